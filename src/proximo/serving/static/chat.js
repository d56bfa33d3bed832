// The chat page. It keeps the conversation, sends all of it with every message, and shows the reply as it is written.
// Everything that a model wrote is put in as text, never as HTML.

const at = (id) => document.getElementById(id)
const token = new URLSearchParams(location.hash.slice(1)).get("token")
const headers = { "content-type": "application/json", ...(token ? { authorization: `Bearer ${token}` } : {}) }

let model = null
let messages = []
let writing = null // stops the reply that is being written

function add(role, text) {
  at("hint")?.remove()
  const box = document.createElement("div")
  box.className = `message ${role}`
  box.textContent = text
  at("messages").append(box)
  box.scrollIntoView({ block: "end" })
  return box
}

function note(box, text, kind = "note") {
  const line = document.createElement("span")
  line.className = `note ${kind}`
  line.textContent = text
  box.append(line)
}

async function failure(response) {
  const body = await response.json().catch(() => null)
  return new Error(body?.error?.message ?? `the server answered ${response.status}`)
}

async function start() {
  const response = await fetch("/v1/models", { headers })
  if (!response.ok) throw await failure(response)
  model = (await response.json()).data[0]
  at("model").textContent = model.id
  document.title = `${model.id} · Proximo`
  if (!model.chat && at("hint"))
    at("hint").textContent = "This model has no chat template: it continues your text, and every text stands alone."
}

function request() {
  const body = { model: model.id, stream: true, stream_options: { include_usage: true } }
  for (const name of ["temperature", "top_p", "max_tokens", "seed"])
    if (at(name).value.trim() !== "") body[name] = Number(at(name).value)
  if (!model.chat) {
    body.max_tokens ??= 256
    return ["/v1/completions", { ...body, prompt: messages.at(-1).content }]
  }
  const system = at("system").value.trim()
  return ["/v1/chat/completions", { ...body, messages: [...(system ? [{ role: "system", content: system }] : []), ...messages] }]
}

// The JSON of each server-sent event; a stream that breaks off before its end is an error.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader()
  let rest = ""
  for (;;) {
    const { done, value } = await reader.read()
    if (done) throw new Error("the connection was lost")
    const parts = (rest + value).split("\n\n")
    rest = parts.pop()
    for (const part of parts) {
      const data = part.replace(/^data: /, "")
      if (data === "[DONE]") return
      yield JSON.parse(data)
    }
  }
}

async function reply(box) {
  const [path, body] = request()
  const started = performance.now()
  const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal: writing.signal })
  if (!response.ok) throw await failure(response)
  let finish = null
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message)
    const [choice] = event.choices
    const follows = at("messages").scrollHeight - at("messages").scrollTop - at("messages").clientHeight < 60
    box.textContent += choice?.delta?.content ?? choice?.text ?? ""
    if (follows) at("messages").scrollTop = at("messages").scrollHeight
    finish = choice?.finish_reason ?? finish
    if (event.usage) {
      const seconds = (performance.now() - started) / 1000
      const count = event.usage.completion_tokens
      at("state").textContent = `${count} token${count === 1 ? "" : "s"} in ${seconds.toFixed(1)} s`
    }
  }
  return finish
}

async function send(text) {
  add("user", text)
  messages.push({ role: "user", content: text })
  const box = add("assistant writing", "")
  writing = new AbortController()
  at("send").textContent = "Stop"
  try {
    const finish = await reply(box)
    messages.push({ role: "assistant", content: box.textContent })
    if (finish === "length") note(box, "cut at the token limit")
  } catch (error) {
    if (error.name === "AbortError") {
      messages.push({ role: "assistant", content: box.textContent })
      note(box, "stopped")
    } else {
      messages.pop()
      note(box, error.message, "error")
    }
  }
  box.classList.remove("writing")
  writing = null
  at("send").textContent = "Send"
}

function fit() {
  at("text").style.height = "auto"
  at("text").style.height = `${at("text").scrollHeight + 2}px`
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault()
  if (writing) return writing.abort()
  const text = at("text").value
  if (!text.trim() || !model) return
  at("text").value = ""
  fit()
  send(text)
})

at("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return
  event.preventDefault()
  if (!writing) at("ask").requestSubmit()
})
at("text").addEventListener("input", fit)

at("reset").addEventListener("click", () => {
  writing?.abort()
  messages = []
  at("messages").replaceChildren()
  at("state").textContent = ""
  at("text").focus()
})

start().catch((error) => {
  at("hint").textContent = error.message
  at("hint").className = "error"
})
