// A page that is opened from a disk may not start a worker, which the search runs in. There an invisible frame takes
// its place: the same script, the same messages.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      inner.postMessage = (data) => queueMicrotask(() => this.dispatchEvent(new MessageEvent("message", { data })));
      const script = frame.contentDocument.createElement("script");
      script.src = new URL(url, document.baseURI).href;
      script.onload = () => {
        this.send = (data) => inner.dispatchEvent(new inner.MessageEvent("message", { data }));
        this.waiting.forEach((data) => this.send(data));
      };
      frame.contentDocument.body.append(script);
    }
    postMessage(data) {
      this.send ? queueMicrotask(() => this.send(data)) : this.waiting.push(data);
    }
    terminate() {}
  };
}
