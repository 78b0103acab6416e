// Puts the parts that the leader sends in their places. They are drawn and escaped there; the content-security
// policy of the page keeps scripts from running that are none of its own.
"use strict";

const RETRY_MS = 5000;
const byId = (name) => document.getElementById(name);

function tell(text, isBad) {
  byId("status").textContent = text;
  byId("status").className = isBad ? "fail" : "";
}

function place(name) {
  if (!byId(name)) {
    const made = document.createElement("div");
    made.id = name;
    byId("charts").append(made);
  }
  return byId(name);
}

function replace(element, text) {
  const inner = () => [...element.querySelectorAll("section, ul")];
  const scrolled = inner().map((one) => [one.scrollLeft, one.scrollTop]);
  element.replaceChildren(...new DOMParser().parseFromString(text, "text/html").body.childNodes);
  inner().forEach((one, k) => scrolled[k] && one.scrollTo(...scrolled[k]));
}

function show(message) {
  for (const [name, text] of Object.entries(message.parts)) replace(place(name), text);
  for (const chart of [...byId("charts").children]) {
    if (!message.order.includes(chart.id)) chart.remove();
  }
  tell("live, " + new Date().toLocaleTimeString(), false);
}

function connect() {
  const source = new EventSource("events" + location.search);
  source.onmessage = (event) => show(JSON.parse(event.data));
  source.onerror = () => {
    tell("No connection. If the run goes on elsewhere, its log has the page's new address.", true);
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, RETRY_MS);
  };
}

connect();
