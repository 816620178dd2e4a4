// Which runs are shown: words that their names, states or configurations have, and comparisons such as
// "loss<2.3" or "num_layers=12".

const COMPARISON = /^([\w./-]+?)(<=|>=|!=|=|<|>)(.+)$/;
const COMPARE = {
  "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b,
  "=": (a, b) => a === b, "!=": (a, b) => a !== b,
};

/** The values of a run that have a name, or one that ends with it. */
function valuesOf({ configuration, totals, last }, name) {
  const entries = [...Object.entries(configuration ?? {}), ...Object.entries(totals ?? {}), ...Object.entries(last ?? {})];
  return entries.filter(([key]) => key === name || key.endsWith(`.${name}`)).map(([, value]) => value);
}

function fits(run, word) {
  const [, name, operator, text] = COMPARISON.exec(word) ?? [];
  if (name) {
    const values = valuesOf(run, name);
    const number = Number(text);
    const compared = (value) => (typeof value === "number" && !Number.isNaN(number)
      ? COMPARE[operator](value, number) : COMPARE[operator](String(value).toLowerCase(), text));
    return values.some(compared);
  }
  const configured = () => Object.entries(run.configuration ?? {}).some(([key, value]) => `${key} ${value}`.toLowerCase().includes(word));
  return `${run.name} ${run.words}`.toLowerCase().includes(word) || configured();
}

/** True if a run has all the words of a text. */
export const matches = (run, text) => text.toLowerCase().split(/\s+/).filter(Boolean).every((word) => fits(run, word));
