"""Upload to the Hugging Face hub."""

import os
from pathlib import Path
from typing import Any, Protocol


class Hub(Protocol):
    """The part of huggingface_hub.HfApi that is used."""

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> Any: ...
    def upload_folder(self, *, folder_path: Path, repo_id: str, commit_message: str) -> Any: ...


def ready_hub(api: Hub | None) -> Hub:
    """The hub; ValueError in one line if it cannot be used."""
    if api is not None:
        return api
    from huggingface_hub import HfApi, constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise ValueError("`to='hub'`, and HF_HUB_OFFLINE is set: unset it, or give `to='folder'` and upload that later")
    if get_token() is None:
        raise ValueError("`to='hub'`, and there is no token: hf auth login, or set HF_TOKEN")
    return HfApi()


def upload(hub: Hub, folder: Path, repository: str, public: bool) -> str:
    """Upload a folder, and return its address. A repository that is there keeps who can see it."""
    try:
        hub.create_repo(repository, private=not public, exist_ok=True)
        hub.upload_folder(folder_path=folder, repo_id=repository, commit_message="Model trained with Proximo")
    except Exception as error:  # of the network, of the server, or of the account
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(f"out is {repository!r}: the hub refused it, {type(error).__name__}: {reason}") from error
    return f"{os.environ.get('HF_ENDPOINT') or 'https://huggingface.co'}/{repository}"
