/* Browsers start no worker for a page that was opened from the disk. There, the search runs in a hidden frame instead. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.append(frame)
      const inside = (this.inside = frame.contentWindow)
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = () => Promise.reject(new Error("only English can be searched from the disk"))
      const script = inside.document.createElement("script")
      script.src = url
      script.onload = () => { for (const data of this.waiting.splice(0)) this.give(data); this.waiting = null }
      inside.document.documentElement.append(script)
    }
    give(data) { this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })) }
    postMessage(data) { this.waiting ? this.waiting.push(data) : this.give(data) }
  }
}
