// Browsers start no web worker from a page that was opened from disk, and the site's search is a worker.
// There, an invisible frame runs the worker's script instead.
if (location.protocol === "file:") {
  const load = (inside, src) => new Promise((resolve, reject) => {
    const script = inside.document.createElement("script")
    script.onload = resolve
    script.onerror = () => reject(new Error(`cannot load ${src}`))
    script.src = src
    inside.document.head.appendChild(script)
  })

  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      const inside = frame.contentWindow
      // A worker can load scripts, and it sends to the page that started it.
      inside.importScripts = (...urls) => urls.reduce((done, src) => done.then(() => load(inside, src)), Promise.resolve())
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      this.started = load(inside, url).then(() => inside)
    }

    postMessage(data) {
      this.started.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
