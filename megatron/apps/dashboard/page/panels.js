// Which charts a set of series makes: sections of panels, in the order of reading.

import { title } from "./format.js";

const EVALUATION_COSTS = new Set(["examples", "seconds", "tokens_per_second", "share_of_time"]);

/** Values that differ from step to step for no reason, which a smoothed line makes readable. */
const NOISY = true;

/** Of the kind `train`, of runs that learn from rewards; as below. */
const REWARDS = [
  ["Rewards", "Reward", "number", ["reward"], NOISY],
  ["Rewards", "Deviation of rewards", "number", ["reward_std"], NOISY],
  ["Rewards", "Groups of equal rewards", "share", ["frac_reward_zero_std"], NOISY],
  ["Rewards", "Tokens of a text", "number", ["completions/mean_length"], NOISY],
  ["Rewards", "Texts that were cut off", "share", ["completions/clipped_ratio"], NOISY],
  ["Rewards", "Entropy of tokens", "number", ["entropy"], NOISY],
  ["Rewards", "Divergence from the reference", "number", ["kl"], NOISY],
  ["Rewards", "Clipped tokens", "share",
    ["clip_ratio/region_mean", "clip_ratio/low_mean", "clip_ratio/high_mean"], NOISY],
  ["Rewards", "Divergence of training from sampling", "number", ["sampling/kl"]],
  ["Rewards", "Difference of training from sampling", "number", ["sampling/logp_difference"]],
];
/** Of the kind `train`: section, title, unit, the series of each panel, whether they are noisy. */
const TRAINING = [
  ["Loss", "Training loss", "number", ["loss"], NOISY],
  ["Optimization", "Learning rate", "number", ["learning_rate"]],
  ["Optimization", "Gradient norm", "number", ["grad_norm"], NOISY],
  ["Speed and memory", "Tokens per second and device", "rate", ["tokens_per_second_per_device"], NOISY],
  ["Speed and memory", "FLOP utilization", "share", ["mfu", "hfu"], NOISY],
  ["Speed and memory", "Time of a step", "seconds", ["seconds_per_iteration"], NOISY],
  [
    "Ranks", "Own time of ranks", "seconds",
    ["own_seconds_slowest", "own_seconds_median", "own_seconds_fastest"], NOISY,
  ],
  ["Ranks", "Slowest rank", "rank", ["slowest_rank"]],
  ["Speed and memory", "Peak memory", "bytes", ["memory_allocated_bytes", "memory_reserved_bytes"]],
  ["Speed and memory", "TFLOP/s per device", "number", ["tflops_per_device"], NOISY],
  ["Speed and memory", "Samples per second", "rate", ["samples_per_second"], NOISY],
  ["Speed and memory", "Trained tokens per second", "rate", ["trained_tokens_per_second"], NOISY],
  ["Experts", "Tokens of the fullest expert over the mean", "number", ["experts_max_over_mean"], NOISY],
  ["Experts", "Entropy of the use of experts", "number", ["experts_entropy"], NOISY],
  ["Experts", "Dropped choices", "share", ["experts_dropped_share"], NOISY],
  ["Experts", "Experts without tokens", "count", ["experts_idle"]],
  ["Energy and cost", "Power", "watts", ["power_watts"], NOISY],
  ["Energy and cost", "Energy", "joules", ["energy_joules"]],
  ["Energy and cost", "Device time", "seconds", ["device_seconds"]],
  ["Energy and cost", "Cost", "money", ["cost", "cost_left"]],
  ["Energy and cost", "CO₂", "grams", ["co2_grams"]],
  ["Energy and cost", "Time left", "seconds", ["seconds_left"]],
  ["Schedule", "Global batch size", "count", ["global_batch_size"]],
  ["Schedule", "Sequence length", "count", ["seq_length"]],
  ["Schedule", "Weight decay", "number", ["weight_decay"]],
  ["Schedule", "Loss scale", "count", ["loss_scale"]],
  ["Schedule", "Skipped and NaN steps", "count", ["skipped_steps", "nan_steps"]],
];
const SECTIONS = [
  "Rewards", "Loss", "Evaluation", "Optimization", "Experts", "Speed and memory", "Ranks", "Data", "Energy and cost", "Schedule",
  "Checkpoints", "Other",
];

const LABELS = {
  loss: "training",
  own_seconds_slowest: "slowest",
  own_seconds_median: "median",
  own_seconds_fastest: "fastest",
  memory_allocated_bytes: "allocated",
  memory_reserved_bytes: "reserved",
  mfu: "MFU",
  hfu: "HFU",
  experts_max_over_mean: "worst layer",
  experts_entropy: "worst layer",
  experts_dropped_share: "worst layer",
  experts_idle: "all layers",
  "clip_ratio/region_mean": "all",
  "clip_ratio/low_mean": "from below",
  "clip_ratio/high_mean": "from above",
  cost: "so far",
  cost_left: "to finish",
};

const BY_TRAINING_NAME = new Map(
  [...REWARDS, ...TRAINING].flatMap(([section, heading, unit, names, noisy], order) =>
    names.map((name) => [name, { section, heading, unit, order, noisy }]),
  ),
);

/** A value of one rank, such as `seconds_rank_3` or `rank3/memory_bytes`. */
const OF_A_RANK = /^(?:(.+?)[_/ ])?rank[_/ ]?(\d+)(?:[_/ ](.+))?$/;
const SYSTEM = /memory|utili[sz]ation|temperature|power|throughput|per_second/;

function unitOf(name) {
  if (/watts$/.test(name)) return "watts";
  if (/utili[sz]ation$/.test(name)) return "number";
  if (/(^|_)seconds$/.test(name)) return "seconds";
  if (/(^|_)bytes$/.test(name)) return "bytes";
  if (/joules$/.test(name)) return "joules";
  return /share/.test(name) ? "share" : "number";
}

/** Where a series is drawn: `{section, heading, unit, order, label, noisy?}`, or null for what is not. */
function placed({ kind, name }) {
  const [family, ...rest] = kind.split(" ");
  const set = rest.join(" ");
  const label = LABELS[name] ?? title(name);
  if (family === "train") {
    const known = BY_TRAINING_NAME.get(name);
    if (known) return { ...known, label };
    const source = /^rewards\/(.+)\/(mean|std)$/.exec(name);
    if (source) {
      const heading = source[2] === "mean" ? "Rewards by source" : "Deviations by source";
      return { section: "Rewards", heading, unit: "number", order: 45, label: source[1], noisy: NOISY };
    }
    if (/loss/.test(name)) {
      return { section: "Loss", heading: "Parts of the loss", unit: "number", order: 50, label: name, noisy: NOISY };
    }
    const [, before, rank, after] = OF_A_RANK.exec(name) ?? [];
    if (rank) {
      const what = [before, after].filter(Boolean).join("_");
      return { section: "Ranks", heading: title(what || "value"), unit: unitOf(what), order: 20, label: `rank ${rank}`, noisy: NOISY };
    }
    if (SYSTEM.test(name)) return { section: "Speed and memory", heading: title(name), unit: unitOf(name), order: 55, label };
    if (/^(data|mix|share)[ _/]/.test(name)) {
      return { section: "Data", heading: "Data mix", unit: "share", order: 50, label: name.replace(/^\w+[ _/]/, "") };
    }
    return { section: "Other", heading: title(name), unit: unitOf(name), order: 60, label };
  }
  if (family === "validation" || family === "test") {
    const heading = `${title(family)} ${name.replaceAll("_", " ")}`;
    const order = (family === "test" ? 60 : 40) + (name === "loss" ? 0 : 1);
    const section = heading === "Validation loss" ? "Loss" : "Evaluation";
    return { section, heading, unit: "number", order, label: set || family };
  }
  if (family === "task") {
    if (EVALUATION_COSTS.has(name) || name.endsWith("ratio")) return null;
    return { section: "Evaluation", heading: title(name), unit: "number", order: 0, label: set };
  }
  if (family === "experts") {
    const [, what, layer] = /^(.+)_layer_(\d+)$/.exec(name) ?? [];
    const known = what && BY_TRAINING_NAME.get(`experts_${what}`);
    return known ? { ...known, heading: `${known.heading}, by layer`, order: known.order + 0.5, label: `layer ${layer}` } : null;
  }
  if (family === "save" || family === "memory_save") {
    if (name === "bytes") return null;
    const heading = family === "save" ? "Saving a checkpoint" : "Saving in memory";
    return { section: "Checkpoints", heading, unit: "seconds", order: 0, label: name === "seconds" ? "to write" : "training stood still" };
  }
  return null;
}

/**
 * Panels `{id, section, heading, unit, noisy, members: [{kind, name, label}]}` for series `{kind, name}`
 * of all runs, each named once.
 */
export function panelsOf(series) {
  const panels = new Map();
  for (const one of series) {
    const place = placed(one);
    if (!place) continue;
    const { section, heading, unit, order, label, noisy = false } = place;
    const id = `${section}/${heading}`;
    if (!panels.has(id)) panels.set(id, { id, section, heading, unit, order, noisy, members: [] });
    const { members } = panels.get(id);
    if (!members.some(({ kind, name }) => kind === one.kind && name === one.name)) {
      members.push({ kind: one.kind, name: one.name, label });
    }
  }
  const rank = ({ section, order }) => 1000 * SECTIONS.indexOf(section) + order;
  return [...panels.values()].sort((a, b) => rank(a) - rank(b));
}
