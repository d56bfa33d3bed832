// Pages opened from a disk may not start workers: there, the site's search runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = (this.inside = frame.contentWindow);
      const load = (address) =>
        new Promise((loaded, failed) => {
          const script = inside.document.createElement("script");
          Object.assign(script, { src: address, onload: loaded, onerror: failed });
          inside.document.head.append(script);
        });
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...addresses) => Promise.all(addresses.map(load));
      this.ready = load(new URL(url, document.baseURI).href);
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
  window.Worker = window.IFrameWorker;
}
