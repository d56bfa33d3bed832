"""Secrets are masked by their names, their places and their form; what is no secret stays as it is."""

import pytest

from proximo.system.secrets import MASK, masked

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl"
ENVIRONMENT = {
    "DEPLOY_KEY": "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEA\nAAAABG5vbmUAAAAE\n-----END-----",
    "SLACK_WEBHOOK": "https://hooks.example.com/services/T00000000/B00000000/AbCdEfGh12345678IjKlMnOp",
    "JWT": JWT,
    "SOMETHING": "Zx9Qw8Er7Ty6Ui5Op4As3Df2",
    "GIT_COMMIT": "2a197069f0c1d2e3a4b5c6d7e8f9a0b1c2d3e4f5",
    "BUILD": "5f0c2f6e-1c1a-4f6e-9a53-0a7f3a5d2b10",
    "PLATFORM": "Python-3.11.7-Linux-x86_64",
    "IMAGE": "registry.example.com/team/Trainer:2026-11-19",
    "LANG": "C.UTF-8",
}
SECRETS = [
    "b3BlbnNzaC1rZXktdjEA",  # one line of several, as a message has it that is cut after the first
    "AAAABG5vbmUAAAAE",
    "AbCdEfGh12345678IjKlMnOp",
    "Zx9Qw8Er7Ty6Ui5Op4As3Df2",
    JWT,
]
SHAPED = [
    "hooks.slack.com/services/T0/B0/xyz",
    "discord.com/api/webhooks/123/abc-def",
    "sk-abcdefghijklmnop1234",
    "hf_abcdefghijklmnop1234",
    "ghp_abcdefghijklmnop1234",
    "xoxb-1234567890-abcdef",
    "AKIAABCDEFGHIJKLMNOP",
    "ASIAABCDEFGHIJKLMNOP",
    "AIzaSyA1234567890abcdefghijklmnopqrstu",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA\nabc==",
    "Authorization: Basic dXNlcjpwYXNzd29yZA==",
    "https://user:word@host/x",
    JWT,
]
ORDINARY = [
    "commit 2a197069f0c1d2e3a4b5c6d7e8f9a0b1c2d3e4f5 of run 5f0c2f6e-1c1a-4f6e-9a53-0a7f3a5d2b10",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "Python-3.11.7-Linux-x86_64 registry.example.com/team/Trainer:2026-11-19 C.UTF-8",
    "step-000100, Qwen3ForCausalLM, model.layers.12.self_attn.q_proj.weight",
    r"The answer is \boxed{42}. AbCdEfGhIjKlMnOpQrStUvWx1234567890 is the alphabet in a model's words",
    "a basic misunderstanding-of-things; eyJ begins base64; a bearer of news; skating sk-8",
    "https://example.com/docs/page?id=12#part",
]


@pytest.mark.parametrize("secret", SECRETS)
def test_secrets_of_the_environment_are_masked(secret: str):
    for text in (f"first {secret} last", f'{{"message": "{secret}\\nmore"}}', secret):
        assert secret not in masked(text, ENVIRONMENT)
        assert MASK in masked(text, ENVIRONMENT)


@pytest.mark.parametrize("text", SHAPED)
def test_what_has_the_form_of_a_key_is_masked_wherever_it_stands(text: str):
    hidden = masked(f"see {text} there", {})
    assert MASK in hidden
    assert text not in hidden
    assert text.split()[-1].rpartition("/")[2] not in hidden or "@" in text


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_stays_as_it_is(text: str):
    assert masked(text, ENVIRONMENT) == text
