"use strict";
// Draws the report: lanes of bars and curves, all over one span of time that is zoomed together.
// Everything that somebody typed comes as text into `textContent` or onto a canvas, never as HTML.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  // What a bar is, as drawing.py has it.
  const [HELD, WAITING, SWITCHING, HOST] = [0, 1, 2, 3];
  const FIRST_STEP = 4, FIRST_JOB = 16, COLOURS = 8;
  const STEPS = ["freeze", "snapshot", "restore", "thaw"];
  const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].flatMap((ten) => [ten, 2 * ten, 5 * ten]);
  const LANE = 36, STRIP = 9, CHART = 170;
  const byId = (id) => document.getElementById(id);

  function element(parent, name, text) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  }

  // --- colours -----------------------------------------------------------------------------

  const probe = element(document.body, "span");
  probe.hidden = true;
  let colours = {};

  // A canvas knows no variables of CSS, so they are looked up whenever the theme changes.
  function colour(name) {
    if (!(name in colours)) {
      probe.style.color = `var(--${name})`;
      colours[name] = getComputedStyle(probe).color;
    }
    return colours[name];
  }
  const jobColour = (job) => colour(`j${job % COLOURS}`);

  function colourOf(kind, job) {
    if (kind >= FIRST_JOB) return jobColour(kind - FIRST_JOB);
    if (kind >= FIRST_STEP) return colour(STEPS[kind - FIRST_STEP]);
    if (kind === WAITING) return colour("waiting");
    if (kind === SWITCHING) return colour("switching");
    return kind === HOST ? colour("host") : jobColour(job);
  }

  // --- texts -------------------------------------------------------------------------------

  function duration(seconds) {
    if (seconds < 10) return `${seconds.toFixed(2)} s`;
    if (seconds < 60) return `${seconds.toFixed(1)} s`;
    const minutes = Math.floor(seconds / 60), rest = Math.floor(seconds % 60);
    if (minutes < 60) return `${minutes} m ${rest} s`;
    return `${Math.floor(minutes / 60)} h ${minutes % 60} m`;
  }

  function clock(seconds, step) {
    const at = new Date(1000 * (data.begin + seconds));
    const two = (n) => String(n).padStart(2, "0");
    const text = `${two(at.getHours())}:${two(at.getMinutes())}`;
    if (step >= 60) return text;
    const tenths = step < 1 ? `.${Math.floor(at.getMilliseconds() / 100)}` : "";
    return `${text}:${two(at.getSeconds())}${tenths}`;
  }

  // --- the tip -----------------------------------------------------------------------------

  const tip = element(document.body, "div");
  tip.className = "tip";
  tip.hidden = true;

  function showTip(event, lines) {
    tip.replaceChildren();
    for (const line of lines) element(tip, "div", line);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = Math.min(event.clientX + 14, window.innerWidth - box.width - 8);
    const top = Math.min(event.clientY + 14, window.innerHeight - box.height - 8);
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, top)}px`;
  }

  // --- one span of time for all --------------------------------------------------------------

  const overTime = [];
  let settingScale = false;

  function setSpan(min, max) {
    settingScale = true;
    for (const plot of overTime) plot.setScale("x", { min, max });
    settingScale = false;
  }

  function follow(plot, key) {
    if (key !== "x" || settingScale || !overTime.includes(plot)) return;
    const { min, max } = plot.scales.x;
    setSpan(Math.max(0, min), Math.min(data.span, max));
  }

  function zoom(factor) {
    const { min, max } = overTime[0].scales.x;
    const middle = (min + max) / 2, half = Math.max(0.005, ((max - min) / 2) * factor);
    setSpan(Math.max(0, middle - half), Math.min(data.span, middle + half));
  }

  // --- plots -------------------------------------------------------------------------------

  const plots = [];
  const width = () => Math.max(280, byId("lanes").clientWidth);
  const labelWidth = () => (width() < 600 ? 84 : 150);

  function axis(more) {
    return {
      stroke: () => colour("soft"),
      grid: { stroke: () => colour("line"), width: 1 },
      ticks: { stroke: () => colour("line"), width: 1 },
      ...more,
    };
  }

  const timeAxis = () =>
    axis({
      space: 80,
      values: (_, at, _axis, _space, step) => at.map((each) => clock(each, step)),
    });

  function timeScale() {
    return { time: false, range: (_, min, max) => [min ?? 0, max > min ? max : min + 1e-3] };
  }

  function add(plot, isOverTime) {
    plots.push(plot);
    if (isOverTime) overTime.push(plot);
    return plot;
  }

  // --- lanes -------------------------------------------------------------------------------

  const isStep = (kind) => kind >= FIRST_STEP && kind < FIRST_JOB;
  const firstJob = data.lanes.findIndex((lane) => lane.kind === "job");
  // Phases of one job are its colour, each a little lighter than the one before.
  const shades = data.lanes.map((lane) => {
    const held = lane.bars.filter((_, n) => n % 4 === 3 && lane.bars[n - 1] === HELD);
    return new Map([...new Set(held)].map((label, n) => [label, Math.max(0.4, 1 - 0.25 * n)]));
  });

  function shortened(name) {
    const most = Math.floor(labelWidth() / 8), half = Math.floor((most - 1) / 2);
    // Devices of one group begin alike, and jobs of one experiment may too.
    return name.length > most ? `${name.slice(0, half)}…${name.slice(-half)}` : name;
  }

  // Where a lane is on the canvas, in its own pixels; steps of moves have a strip at the bottom.
  function place(plot, index) {
    const { bbox } = plot, ratio = devicePixelRatio || 1;
    const high = bbox.height / data.lanes.length, pad = 4 * ratio;
    const strip = data.lanes[index].kind === "job" ? STRIP * ratio : 0;
    const top = bbox.top + index * high;
    return {
      ratio, strip,
      y: top + pad, tall: high - 2 * pad - strip, stripY: top + high - pad - strip,
      left: bbox.left, right: bbox.left + bbox.width,
    };
  }

  function paintLane(plot, index) {
    const { ctx } = plot, lane = data.lanes[index], where = place(plot, index);
    const { min, max } = plot.scales.x, scale = (where.right - where.left) / (max - min);
    for (let n = 0; n < lane.bars.length; n += 4) {
      const [begin, length, kind, label] = lane.bars.slice(n, n + 4);
      const x = where.left + (begin / 1000 - min) * scale;
      const wide = Math.max(where.ratio, (length / 1000) * scale);
      if (x + wide < where.left || x > where.right) continue;
      ctx.globalAlpha = kind === HELD ? shades[index].get(label) : kind === HOST ? 0.45 : 1;
      ctx.fillStyle = colourOf(kind, index - firstJob);
      if (isStep(kind)) ctx.fillRect(x, where.stripY, wide, where.strip);
      else {
        ctx.fillRect(x, where.y, wide, where.tall);
        if (kind !== WAITING) paintText(ctx, where, x, wide, kind, data.labels[label]);
      }
    }
    ctx.globalAlpha = 1;
  }

  function paintText(ctx, where, x, wide, kind, text) {
    const from = Math.max(x, where.left) + 4 * where.ratio;
    const room = Math.min(x + wide, where.right) - from;
    if (room < 28 * where.ratio || ctx.measureText(text).width > room) return;
    ctx.globalAlpha = 1;
    ctx.fillStyle = kind === HOST ? colour("ink") : colour("ground");
    ctx.fillText(text, from, where.y + where.tall / 2);
  }

  function paintLanes(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.font = `${11 * (devicePixelRatio || 1)}px system-ui, sans-serif`;
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    data.lanes.forEach((_, index) => paintLane(plot, index));
    ctx.restore();
  }

  function barAt(plot, left, top) {
    const high = plot.over.clientHeight / data.lanes.length;
    const index = Math.floor(top / high), lane = data.lanes[index];
    if (lane === undefined) return null;
    const at = 1000 * plot.posToVal(left, "x"), slack = 1000 * plot.posToVal(left + 2, "x") - at;
    const inStrip = lane.kind === "job" && top - index * high > high - STRIP - 6;
    let found = null;
    for (let n = 0; n < lane.bars.length; n += 4) {
      const [begin, length, kind, label] = lane.bars.slice(n, n + 4);
      if (begin - slack > at) break;
      if (isStep(kind) === inStrip && at <= begin + length + slack)
        found = { lane, begin, length, label };
    }
    return found;
  }

  function hover(plot, event) {
    const found = barAt(plot, event.offsetX, event.offsetY);
    if (found === null) {
      tip.hidden = true;
      return;
    }
    showTip(event, [
      data.labels[found.label],
      `${duration(found.length / 1000)} from ${clock(found.begin / 1000, 0.5)}`,
      found.lane.name,
    ]);
  }

  function lanes() {
    const count = data.lanes.length;
    if (count === 0) return;
    const names = axis({
      size: labelWidth(),
      splits: () => data.lanes.map((_, index) => count - index - 0.5),
      values: () => data.lanes.map((lane) => shortened(lane.name)),
      grid: { show: false },
      ticks: { show: false },
    });
    const options = {
      width: width(),
      height: count * LANE + 60,
      legend: { show: false },
      cursor: { sync: { key: "time" }, y: false, points: { show: false } },
      scales: { x: timeScale(), y: { range: () => [0, count] } },
      series: [{}, { show: true, stroke: "transparent", points: { show: false } }],
      axes: [timeAxis(), names],
      hooks: { draw: [paintLanes], setScale: [follow] },
    };
    const plot = add(new uPlot(options, [[0, data.span], [null, null]], byId("lanes")), true);
    plot.over.addEventListener("mousemove", (event) => hover(plot, event));
    plot.over.addEventListener("mouseleave", () => (tip.hidden = true));
    plot.setScale("x", { min: 0, max: data.span });
  }

  // --- curves ------------------------------------------------------------------------------

  const rounded = (value) => (value == null ? "-" : String(Number(value.toPrecision(5))));

  function seriesOf(spec) {
    const stepped = spec.steps ? { paths: uPlot.paths.stepped({ align: 1 }) } : {};
    let solid = -1;
    return spec.curves.map((curve) => {
      // A dashed curve belongs to the one before it, and has its colour.
      if (!curve.dash) solid += 1;
      const number = Math.max(0, solid);
      return {
        label: curve.label,
        stroke: () => jobColour(number),
        width: 1.5,
        dash: curve.dash ? [5, 4] : undefined,
        spanGaps: true,
        points: { show: curve.x.length < 40 && !spec.steps, size: 4 },
        value: (_, value) => rounded(value),
        ...stepped,
      };
    });
  }

  function chart(spec, parent) {
    const isTime = spec.x === "time";
    element(parent, "h3", spec.unit ? `${spec.title} (${spec.unit})` : spec.title);
    const tables = spec.curves.map((curve) => [curve.x, curve.y]);
    const x = {
      label: { time: "Time", step: "Step", seconds: "Seconds" }[spec.x],
      value: (_, value) => (value != null && isTime ? clock(value, 0.5) : rounded(value)),
    };
    const options = {
      width: width(),
      height: CHART,
      cursor: isTime ? { sync: { key: "time" } } : {},
      scales: {
        x: isTime ? timeScale() : { time: false },
        y: spec.most ? { range: () => [0, spec.most] } : {},
      },
      series: [x, ...seriesOf(spec)],
      axes: [
        isTime ? timeAxis() : axis(spec.x === "step" ? { incrs: WHOLE } : {}),
        axis({ size: labelWidth() }),
      ],
      hooks: { setScale: [follow] },
    };
    const joined = tables.length > 1 ? uPlot.join(tables) : tables[0];
    const plot = add(new uPlot(options, joined, parent), isTime);
    if (isTime) plot.setScale("x", { min: 0, max: data.span });
  }

  // --- what is around them -----------------------------------------------------------------

  function tools() {
    const parent = byId("tools");
    const button = (text, act) => element(parent, "button", text).addEventListener("click", act);
    button("Zoom in", () => zoom(0.5));
    button("Zoom out", () => zoom(2));
    button("All", () => setSpan(0, data.span));
    button("Light or dark", () => {
      const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
      const now = document.documentElement.dataset.theme ?? (isDark ? "dark" : "light");
      document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
      recolour();
    });
    const note = "Drag over a stretch to zoom in, double-click for all of it.";
    element(parent, "span", note).className = "note";
  }

  function key() {
    const parent = byId("key");
    parent.replaceChildren();
    const named = data.jobs.map((name, job) => [name, jobColour(job)]);
    named.push(["on the host", colour("host")]);
    for (const name of ["waiting", "switching", ...STEPS]) named.push([name, colour(name)]);
    for (const [name, swatch] of named)
      element(parent, "span", name).style.setProperty("--swatch", swatch);
  }

  function recolour() {
    colours = {};
    key();
    for (const plot of plots) plot.redraw(false, true);
  }

  function resize() {
    for (const plot of plots) plot.setSize({ width: width(), height: plot.height });
  }

  tools();
  key();
  lanes();
  for (const spec of data.charts) {
    chart(spec, byId({ time: "time", step: "steps", seconds: "spreads" }[spec.x]));
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  window.addEventListener("resize", resize);
  // For whoever looks from outside, such as tests: what is shown of the time now.
  window.report = { span: () => overTime.map((plot) => [plot.scales.x.min, plot.scales.x.max]) };
})();
