// Search in pages that were opened as files: browsers start no worker from a file, so the script of
// the worker runs in a hidden frame. Pages that a server sends use the real worker.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inner = frame.contentWindow
      // What the script posts arrives here, as it would from a worker.
      this.inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = this.inner.document.createElement("script")
      this.loaded = new Promise((done) => { script.onload = done })
      script.src = url
      this.inner.document.body.append(script)
    }
    postMessage(data) {
      this.loaded.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.inner.frameElement.remove()
    }
  }
}
