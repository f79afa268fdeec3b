// Material's search runs in a Web Worker, which browsers refuse to pages that are opened as files. There, a hidden frame does
// its work. mkdocs.yml names this file in place of the script that the offline plugin would load from another host.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.ready = new Promise(resolve => (frame.onload = resolve)).then(() => {
        const scope = frame.contentWindow
        const load = source =>
          new Promise((resolve, reject) => {
            const script = scope.document.createElement("script")
            Object.assign(script, { src: source, onload: resolve, onerror: reject })
            scope.document.body.append(script)
          })
        scope.importScripts = (...sources) => sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve())
        scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
        return load(address).then(() => scope)
      })
      frame.srcdoc = "<body></body>"
      document.body.append(frame)
    }

    postMessage(data) {
      this.ready.then(scope => scope.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
