"use strict";
const PROTOCOLS = ["nbd", "iscsi", "iser", "nvme-tcp", "nvme-rdma", "srp", "aoe"];
const MOST_SESSIONS = 200, SHOWN_ACTIONS = 8, SHOWN_DRIFT = 20, EVERY_MS = 2000, DRIFT_EVERY = 5, POINTS = 360, FEWEST_POINTS = 30, POINTS_A_MINUTE = 6;
const $ = id => document.getElementById(id);
let token = null, before = null, timer = null, looks = 0;
/* The rows of the tables that can be filtered and sorted, and how they are sorted. */
const tables = { volumes: [], sessions: [] }, sorting = {};

try { token = sessionStorage.getItem("token"); } catch (error) { token = null; }
if (location.hash.startsWith("#token=")) {
  keep(decodeURIComponent(location.hash.slice(7)));
  history.replaceState(null, "", location.pathname);
}

function keep(value) {
  token = value;
  try { value ? sessionStorage.setItem("token", value) : sessionStorage.removeItem("token"); } catch (error) { /* kept here */ }
}

async function get(path) {
  const headers = token ? { authorization: "Bearer " + token } : {};
  const answer = await fetch(path, { headers, cache: "no-store" });
  if (answer.status === 401) throw { unauthorized: true };
  return answer;
}

async function ask(path) {
  const answer = await get(path);
  if (!answer.ok) throw new Error(path + ": " + answer.status);
  return answer.json();
}

function scaled(value, base, units) {
  let unit = 0;
  while (value >= base && unit + 1 < units.length) { value /= base; unit += 1; }
  return [value >= 100 || unit === 0 ? Math.round(value).toString() : value.toPrecision(3), units[unit]];
}
const bytes = value => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
const size = value => bytes(value).join(" ");
const speed = value => bytes(value).join(" ") + "/s";
const count = value => value < 10000 ? value.toLocaleString("en") : scaled(value, 1000, ["", "k", "M", "G"]).join("");
const micros = value => value == null ? ["\u2013", ""] : scaled(value, 1000, ["\u00b5s", "ms", "s"]);
const latency = value => micros(value).join(" ").trim();
const time = value => new Date(value).toLocaleString([], { dateStyle: "short", timeStyle: "short" });

/* Names of clients must not hide or reorder what stands beside them. */
const printable = text => String(text ?? "").replace(/[\p{C}\p{Zl}\p{Zp}\p{DI}]/gu, c => `\\u{${c.codePointAt(0).toString(16)}}`);

function element(name, classes, text) {
  const made = document.createElement(name);
  if (classes) made.className = classes;
  if (text !== undefined) made.textContent = printable(text);
  return made;
}

function drawn(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = printable(text);
  return made;
}

/* Points in the width of a chart: those of an hour, or fewer while the daemon is young. */
const span = series => Math.min(POINTS, Math.max(FEWEST_POINTS, series[0].values.length));

/* The lines of some series, in a box of width x height; the newest point is at its right edge. */
function lines(svg, series, box) {
  const points = span(series);
  const top = Math.max(1e-9, ...series.flatMap(one => one.values.map(value => value ?? 0)));
  for (const { values, kind } of series) {
    const x = nth => box.left + box.width * (points - values.length + nth + 1) / points;
    const y = value => box.top + box.height * (1 - value / (top * 1.08));
    const runs = [];
    values.forEach((value, nth) => {
      if (value == null) return;
      if (values[nth - 1] == null || !runs.length) runs.push([]);
      runs[runs.length - 1].push([x(nth), y(value)]);
    });
    for (const run of runs) {
      /* A single point is as wide as its interval. */
      if (run.length === 1) run.unshift([run[0][0] - box.width / points, run[0][1]]);
      const corners = run.map(([left, up]) => left.toFixed(1) + "," + up.toFixed(1)).join(" ");
      const floor = (box.top + box.height).toFixed(1), ends = [run[0][0].toFixed(1), run[run.length - 1][0].toFixed(1)];
      svg.append(drawn("polygon", { class: "area " + kind, points: `${ends[0]},${floor} ${corners} ${ends[1]},${floor}` }));
      svg.append(drawn("polyline", { class: "line " + kind, points: corners }));
    }
  }
  return top;
}

function chart(id, series, label) {
  const svg = $(id), width = Math.max(200, svg.clientWidth), height = Math.max(90, svg.clientHeight);
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const box = { left: 0, top: 14, width: width - 1, height: height - 32 };
  for (const share of [0, 0.5, 1]) {
    const y = box.top + box.height * (1 - share / 1.08);
    svg.append(drawn("line", { class: "grid", x1: 0, x2: width, y1: y, y2: y }));
  }
  const top = lines(svg, series, box), points = span(series);
  const any = series.some(one => one.values.some(value => value > 0));
  svg.append(drawn("text", { x: 0, y: 10 }, any ? label(top) : "nothing yet"));
  svg.append(drawn("text", { x: 0, y: height - 3 }, points === POINTS ? "1 hour ago" : `${points / POINTS_A_MINUTE | 0} min ago`));
  svg.append(drawn("text", { x: width, y: height - 3, class: "end" }, "now"));
}

function spark(points) {
  const svg = drawn("svg", { viewBox: "0 0 128 26", preserveAspectRatio: "none", "aria-hidden": "true" });
  const values = points.map(point => point.reads + point.writes + point.others);
  lines(svg, [{ values, kind: "read" }], { left: 0, top: 1, width: 127, height: 24 });
  return svg;
}

function rows(id, made, empty) {
  const body = $(id).tBodies[0];
  if (!made.length) {
    const row = element("tr"), cell = element("td", "empty", empty);
    cell.colSpan = 12;
    row.append(cell);
    made = [row];
  }
  body.replaceChildren(...made);
}

/* What is filtered out of a table stays in it: a row is made when it is first shown. */
function place(id, empty, most) {
  const text = $("filter").value.trim().toLowerCase(), onlyActive = $("active").checked;
  const chosen = tables[id].filter(one => (!onlyActive || one.isActive) && one.text.includes(text));
  const order = sorting[id];
  if (order) {
    const sign = order.down ? -1 : 1;
    chosen.sort((a, b) => sign * compare(a.keys[order.nth], b.keys[order.nth]));
  }
  const shown = chosen.slice(0, most);
  rows(id, shown.map(one => one.row ??= one.make()), tables[id].length ? "none matches" : empty);
  return [shown.length, chosen.length];
}

function compare(a, b) {
  if (typeof a === "number" || typeof b === "number") return (a ?? -1) - (b ?? -1);
  return String(a ?? "").localeCompare(String(b ?? ""), "en", { numeric: true });
}

function placeAll() {
  const [volumes] = place("volumes", "no volumes", Infinity), all = tables.volumes.length;
  $("shown").textContent = volumes < all ? `${volumes} of ${all} shown` : "";
  const [shown, found] = place("sessions", "no client is connected", MOST_SESSIONS);
  $("more-sessions").hidden = found <= shown;
  $("more-sessions").textContent = `and ${found - shown} more`;
}

/* A click on a heading sorts by its column, numbers from the largest down; another click turns the order. */
function makeSortable(id) {
  const heads = [...$(id).tHead.rows[0].cells];
  heads.forEach((head, nth) => {
    const button = element("button", "sort", head.textContent);
    button.type = "button";
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const now = sorting[id];
      const down = now && now.nth === nth ? !now.down : head.classList.contains("number");
      sorting[id] = { nth, down };
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      placeAll();
    });
  });
}

function number(label, text, isBad) {
  const cell = element("td", "number" + (isBad ? " bad" : ""), text);
  cell.dataset.label = label;
  return cell;
}

/* Limits with their units: "500 IOPS, write 10 MiB/s". */
function limitText(limits) {
  const kinds = ["", "read_", "write_"], parts = [];
  for (const kind of kinds) if (limits[kind + "iops"]) parts.push(kind.replace("_", " ") + count(limits[kind + "iops"]) + " IOPS");
  for (const kind of kinds) if (limits[kind + "bandwidth"]) parts.push(kind.replace("_", " ") + speed(limits[kind + "bandwidth"]));
  if (limits.burst_ms) parts.push("burst " + latency(limits.burst_ms * 1000));
  return parts.map(part => part.replace(/\.0+ /, " ")).join(", ");
}

/* What limits hold back: the requests that wait now, and the share of the last second's. */
function throttledText(volume, now) {
  const pending = volume.throttled ? volume.throttled.pending : 0, parts = [];
  if (pending) parts.push(count(pending) + " throttled now");
  if (now && now.throttled) {
    const share = Math.round(100 * now.throttled / Math.max(now.reads + now.writes + now.others, now.throttled));
    parts.push(Math.max(1, share) + "% throttled");
  }
  return parts.join(", ");
}

const SHOWN_TARGETS = 3;
/* The protocols of a volume, and its targets there. */
function exported(volume) {
  const cell = element("td", "exported");
  for (const name of volume.protocols) {
    const badge = element("span", "protocol", name);
    badge.style.setProperty("--c", `var(--${PROTOCOLS.includes(name) ? name : "other"})`);
    cell.append(badge, " ");
  }
  if (!volume.protocols.length) cell.append("\u2013");
  for (const target of volume.targets.slice(0, SHOWN_TARGETS)) cell.append(element("p", "limits", target));
  const more = volume.targets.length - SHOWN_TARGETS;
  if (more > 0) cell.append(element("p", "limits", `and ${more} more`));
  return cell;
}

/* A row of the table of volumes, with what it is sorted and found by. */
function volumeEntry(volume, series) {
  const now = series ? series.now : {}, requests = (now.reads ?? 0) + (now.writes ?? 0) + (now.others ?? 0);
  return {
    make: () => volumeRow(volume, series),
    keys: [volume.name, volume.size, volume.users, now.reads, now.writes, now.read_bytes, now.written_bytes, now.p99_us,
      volume.failed, volume.protocols.join(" "), volume.read_only ? "read-only" : "", requests],
    text: [volume.name, ...volume.protocols, ...volume.targets].join("\n").toLowerCase(),
    /* Only some volumes have a series of rates. */
    isActive: series ? requests > 0 || now.throttled > 0 : volume.users > 0,
  };
}

function volumeRow(volume, series) {
  const row = element("tr"), now = series ? series.now : null;
  const rate = (pick, show) => now ? show(pick(now)) : "\u2013";
  row.append(element("th", "", volume.name));
  row.append(number("size", size(volume.size)), number("users", volume.users));
  row.append(number("reads/s", rate(one => one.reads, count)), number("writes/s", rate(one => one.writes, count)));
  row.append(number("read", rate(one => one.read_bytes, speed)), number("written", rate(one => one.written_bytes, speed)));
  row.append(number("99%", now ? latency(now.p99_us) : "\u2013"), number("failed", count(volume.failed), volume.failed > 0));
  const state = element("td", "notes");
  if (volume.read_only) state.append(element("span", "badge", "read-only"));
  if (volume.reservation) {
    const text = volume.reservation.reserved ? "reserved" : volume.reservation.registrants + " registered";
    state.append(element("span", "badge", text));
  }
  if (volume.orphaned_connections) state.append(element("span", "badge bad", volume.orphaned_connections + " lost with I/O in flight"));
  if (volume.reconnects) state.append(element("span", "badge", volume.reconnects + " reconnects"));
  if (volume.populated && volume.populated.bytes < volume.populated.of) {
    state.append(element("span", "badge", "populated " + Math.floor(100 * volume.populated.bytes / volume.populated.of) + "%"));
  }
  const throttled = throttledText(volume, now);
  if (throttled) state.append(element("span", "badge warn", throttled));
  if (volume.limits) state.append(element("p", "limits", "limit " + limitText(volume.limits)));
  if (volume.client_limits) state.append(element("p", "limits", "each client " + limitText(volume.client_limits)));
  row.append(exported(volume), state);
  const hour = element("td");
  if (series) hour.append(spark(series.points));
  row.append(hour);
  return row;
}

const moved = session => session.read_bytes + session.written_bytes;
const asked = session => session.reads + session.writes + session.others;
/* The cells of what a session or a disk does now, from its counters and those of the last look. */
function trafficCells(one, earlier, seconds) {
  const rate = pick => earlier && seconds > 0 ? Math.max(0, (pick(one) - pick(earlier)) / seconds) : null;
  const requests = rate(asked), flow = rate(moved);
  return [number("requests/s", requests == null ? "\u2013" : count(Math.round(requests))),
    number("bytes/s", flow == null ? "\u2013" : speed(flow)),
    number("failed", count(one.failed), one.failed > 0)];
}

const key = session => [session.protocol, session.initiator, session.target, session.address, session.since].join("\n");

function sessionRow(session, earlier, seconds) {
  const row = element("tr"), name = element("th", "protocol", session.protocol);
  const known = PROTOCOLS.includes(session.protocol) ? session.protocol : "other";
  name.style.setProperty("--c", `var(--${known})`);
  const from = element("td", "", session.address);
  const initiator = element("td", "long", session.initiator), target = element("td", "long", session.target);
  const since = element("td", "", time(session.since));
  row.append(name, from, initiator, target, since, ...trafficCells(session, earlier, seconds));
  return row;
}

function sessionEntry(session, earlier, seconds) {
  const rate = pick => earlier && seconds > 0 ? Math.max(0, (pick(session) - pick(earlier)) / seconds) : null;
  const requests = rate(asked);
  return {
    make: () => sessionRow(session, earlier, seconds),
    keys: [session.protocol, session.address, session.initiator, session.target, session.since, requests, rate(moved),
      session.failed],
    text: [session.protocol, session.address, session.initiator, session.target].join("\n").toLowerCase(),
    isActive: requests > 0,
  };
}

function diskRow(disk, earlier, seconds) {
  const row = element("tr"), state = element("td", "notes");
  row.append(element("th", "", disk.volume), element("td", "long", disk.device ?? "\u2013"), element("td", "", disk.via ?? "\u2013"));
  if (disk.state !== "attached") state.append(element("span", "badge" + (disk.state === "failed" ? " bad" : ""), disk.state));
  if (disk.read_only) state.append(element("span", "badge", "read-only"));
  if (disk.recovered) state.append(element("span", "badge", "recovered"));
  if (disk.error) state.append(element("p", "limits", disk.error));
  row.append(state, ...trafficCells(disk, earlier, seconds));
  return row;
}

function show(status, sessions, hour, actions) {
  const now = hour.total.now, points = hour.total.points;
  $("iops").textContent = count(now.reads + now.writes + now.others);
  $("iops-parts").textContent = `${count(now.reads)} reads, ${count(now.writes)} writes`;
  [$("bytes").textContent, $("bytes-unit").textContent] = bytes(now.read_bytes + now.written_bytes);
  $("bytes-unit").textContent += "/s";
  $("bytes-parts").textContent = `${speed(now.read_bytes)} read, ${speed(now.written_bytes)} written`;
  [$("p50").textContent, $("p50-unit").textContent] = micros(now.p50_us);
  $("p99").textContent = now.p99_us == null ? "no requests" : "99% below " + latency(now.p99_us);
  $("connections").textContent = status.connections;
  const parts = status.protocols.filter(one => one.connections).map(one => `${one.name} ${one.connections}`);
  $("connections-parts").textContent = parts.join(", ") || `of ${status.max_connections}`;
  const failed = points.reduce((sum, point) => sum + point.failed, 0);
  $("failed").textContent = count(failed);
  const gone = status.orphaned_connections ? `, ${status.orphaned_connections} lost with I/O in flight` : "";
  const ever = status.volumes.reduce((sum, volume) => sum + volume.failed, 0);
  $("failed-parts").textContent = `${count(ever)} since the start${gone}`;
  $("failed-tile").classList.toggle("alarm", failed > 0 || status.orphaned_connections > 0);
  const series = (pick, kind) => ({ values: points.map(pick), kind });
  chart("chart-iops", [series(one => one.reads, "read"), series(one => one.writes, "write")], top => count(Math.round(top)) + "/s");
  chart("chart-bytes", [series(one => one.read_bytes, "read"), series(one => one.written_bytes, "write")], speed);
  chart("chart-latency", [series(one => one.p50_us, "read"), series(one => one.p99_us, "write")], latency);
  const of = new Map(hour.volumes.map(one => [one.name, one]));
  tables.volumes = status.volumes.map(volume => volumeEntry(volume, of.get(volume.name)));
  const seconds = before ? (performance.now() - before.at) / 1000 : 0;
  const earlier = before ? before.sessions : new Map();
  tables.sessions = sessions.map(one => sessionEntry(one, earlier.get(key(one)), seconds));
  placeAll();
  const disks = before ? before.disks : new Map();
  rows("disks", status.attachments.map(one => diskRow(one, disks.get(one.volume), seconds)), "");
  $("disks-section").hidden = !status.attachments.length;
  before = {
    at: performance.now(),
    sessions: new Map(sessions.map(one => [key(one), one])),
    disks: new Map(status.attachments.map(one => [one.volume, one])),
  };
  $("actions-section").hidden = !actions.length;
  rows("actions", actions.slice(-SHOWN_ACTIONS).reverse().map(one => {
    const row = element("tr"), state = element("td", "long" + (one.state === "failed" ? " bad" : ""));
    state.textContent = one.error ? one.error.message : one.state === "running" && one.progress ? one.progress : one.state;
    row.append(element("td", "", time(one.begun)), element("td", "long", one.action), state);
    return row;
  }), "");
}

/* How the config file differs from what runs. */
async function lookForDrift() {
  const answer = await get("/v1/config/diff");
  const hasFile = answer.status !== 409;
  $("config").hidden = !hasFile;
  if (answer.status !== 200 && answer.status !== 422) return;
  const said = await answer.json();
  const lines = [...(said.changes ?? []).map(one => {
    const count = one.affected.length;
    return one.change + (count ? ` (affects ${count} ${count === 1 ? "session" : "sessions"})` : "");
  }), ...(said.next_start ?? []).map(one => one.change + " (at the next start)")];
  if (said.error) lines.push(said.error.message + (said.error.hint ? "; " + said.error.hint : ""));
  const more = lines.length - SHOWN_DRIFT;
  const shown = more > 0 ? [...lines.slice(0, SHOWN_DRIFT), `and ${more} more`] : lines;
  $("drift").replaceChildren(...shown.map(line => element("li", "", line)));
  $("drift-section").hidden = !lines.length;
  $("drift-section").classList.toggle("wrong", !!said.error);
  $("drift-head").textContent = said.error ? "The config file has an error" : "The config file differs from what runs";
  $("drift-note").textContent = said.error ? "The daemon goes on as it is. A restart would fail."
    : "\u201cblockmux ctl reload\u201d applies the file. \u201cblockmux ctl save\u201d writes what runs into it.";
  const state = said.error ? ["config file has an error", "lost"] : lines.length ? ["config file differs", "drifted"] : ["config file applied", "live"];
  $("config").textContent = state[0];
  $("config").className = "state " + state[1];
}

function say(text, kind) {
  $("state").textContent = text;
  $("state").className = "state " + kind;
}

async function look() {
  clearTimeout(timer);
  try {
    const all = await Promise.all(["/v1/status", "/v1/sessions", "/v1/history", "/v1/actions"].map(ask));
    if (looks++ % DRIFT_EVERY === 0) await lookForDrift();
    $("login").hidden = true;
    $("main").hidden = false;
    show(...all);
    say(`live at ${location.host || "this daemon"}`, "live");
  } catch (error) {
    if (error && error.unauthorized) {
      $("wrong").hidden = !token;
      keep(null);
      looks = 0;
      $("login").hidden = false;
      $("main").hidden = true;
      say("a token is required", "");
      $("token").focus();
      return;
    }
    say(`no answer (${error.message}); trying again`, "lost");
  }
  timer = setTimeout(look, EVERY_MS);
}

for (const id of ["volumes", "sessions"]) makeSortable(id);
$("filter").addEventListener("input", placeAll);
$("active").addEventListener("change", placeAll);
$("volumes").classList.add("stack");
$("disks").classList.add("stack");
$("sessions").classList.add("stack");
$("login").addEventListener("submit", event => {
  event.preventDefault();
  keep($("token").value.trim());
  $("token").value = "";
  look();
});
look();
