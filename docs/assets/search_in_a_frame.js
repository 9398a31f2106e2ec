// Browsers start no worker from a file. There the search's worker runs in a frame of the page.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.ready = new Promise((started) => this.frame.addEventListener("load", started, { once: true }));
      this.frame.srcdoc = `<script>
        self.receive = self.postMessage.bind(self);
        self.postMessage = (data) => parent.dispatchEvent(new MessageEvent("from-${url}", { data }));
      </script><script src="${url}"></script>`;
      window.addEventListener(`from-${url}`, ({ data }) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      });
      document.documentElement.append(this.frame);
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.receive(data, "*"));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
