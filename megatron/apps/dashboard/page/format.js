// Numbers as people read them. A unit is one of the keys of UNITS.

const MINUS = "\u2212";
const THIN = "\u2009";
const COUNTS = ["", "K", "M", "B", "T"]; // of tokens and steps, as the field writes them
const BINARY = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** `digits` significant ones, without trailing zeros; powers of ten where zeros would fill it. */
export function plain(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : `${MINUS}∞`;
  const size = Math.abs(value);
  const far = size !== 0 && (size < 1e-3 || size >= 1e7);
  const text = far ? value.toExponential(digits - 1) : value.toPrecision(digits);
  const [, mantissa, power] = /^(-?[\d.]+)(?:e([+-]\d+))?$/.exec(text);
  const short = mantissa.includes(".") ? mantissa.replace(/\.?0+$/, "") : mantissa;
  const exponent = power ? `e${Number(power)}` : "";
  return (short + exponent).replaceAll("-", MINUS);
}

function scaled(value, step, names, digits, gap = "") {
  if (value === null || value === undefined || !Number.isFinite(value)) return plain(value);
  let level = 0;
  let rest = value;
  while (Math.abs(rest) >= step && level < names.length - 1) {
    rest /= step;
    level += 1;
  }
  return `${plain(rest, Math.abs(rest) >= 1000 ? 4 : digits)}${gap}${names[level]}`;
}

/** A count with all its digits, in groups. */
export const grouped = (value) =>
  Number.isFinite(value) ? Math.round(value).toLocaleString("en").replaceAll(",", THIN) : "–";

/** Seconds as `1 d 3 h`, `2 h 5 min`, `3 min 20 s`, `12.5 s` or `8.1 ms`. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return plain(seconds);
  if (seconds < 0) return MINUS + duration(-seconds);
  if (seconds === 0) return "0 s";
  if (seconds < 1) return `${plain(1000 * seconds, 3)} ms`;
  if (seconds < 60) return `${plain(seconds, 3)} s`;
  const parts = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = parts.findIndex(([, size]) => seconds >= size);
  const [[name, size], next] = [parts[first], parts[first + 1]];
  const whole = Math.floor(seconds / size);
  const rest = next ? Math.floor((seconds - whole * size) / next[1]) : 0;
  return rest ? `${whole} ${name} ${rest} ${next[0]}` : `${whole} ${name}`;
}

/** How the values of each unit are written, next to a curve and on an axis. */
export const UNITS = {
  number: plain,
  count: (value) => scaled(value, 1000, COUNTS, 4),
  rate: (value) => scaled(value, 1000, COUNTS, 4),
  bytes: (value) => scaled(value, 1024, BINARY, 4, " "),
  seconds: duration,
  share: (value) => (Number.isFinite(value) ? `${plain(100 * value, 3)}${THIN}%` : plain(value)),
  joules: (value) => (Math.abs(value) >= 3.6e6
    ? `${scaled(value / 3600, 1000, ["Wh", "kWh", "MWh", "GWh"], 4, " ")}`
    : `${scaled(value, 1000, ["", "k", "M"], 4, " ")}J`),
  watts: (value) => `${scaled(value, 1000, ["", "k", "M"], 4, " ")}W`,
  rank: grouped,
  grams: (value) => scaled(value, 1000, ["g", "kg", "t"], 4, " "),
  money: (value) => (Math.abs(value) >= 1 ? value.toFixed(2) : plain(value, 3)),
};

export const write = (unit, value) => (UNITS[unit] ?? plain)(value);

/** The horizontal axes: the name of each, its unit, and its word before a value. */
export const CLOCKS = {
  iteration: { name: "Steps", unit: "count", word: "step" },
  tokens: { name: "Tokens", unit: "count", word: "tokens" },
  samples: { name: "Samples", unit: "count", word: "samples" },
  seconds: { name: "Time", unit: "seconds", word: "time" },
};

/** A position as the readout has it. */
export function position(clock, value) {
  const { unit, word } = CLOCKS[clock];
  const text = unit === "seconds" ? duration(value) : grouped(value);
  return `${word} ${text}`;
}

/** A name of a metric as a title: `grad_norm` is "Grad norm". */
export function title(name) {
  const words = name.replaceAll("_", " ").trim();
  return words.charAt(0).toUpperCase() + words.slice(1);
}
