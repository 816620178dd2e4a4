// Fingers on a plot: one moves the pointer's line, two choose what is seen. Up and down scrolls.

/** `moved` gets a position in pixels from the left, `pinched` the two ends of what is to be seen. */
export function followTouch(place, { moved, pinched }) {
  const fingers = new Map();
  let began = null;

  const ends = () => {
    const left = place.getBoundingClientRect().left;
    return [...fingers.values()].map((x) => x - left).sort((a, b) => a - b);
  };

  place.style.touchAction = "pan-y";
  place.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "touch") return;
    fingers.set(event.pointerId, event.clientX);
    if (fingers.size === 2) began = ends();
    else moved(ends()[0]);
  });
  place.addEventListener("pointermove", (event) => {
    if (!fingers.has(event.pointerId)) return;
    fingers.set(event.pointerId, event.clientX);
    if (fingers.size === 1) moved(ends()[0]);
  });
  for (const end of ["pointerup", "pointercancel"]) {
    place.addEventListener(end, (event) => {
      if (fingers.size === 2 && began && end === "pointerup") pinched(...seen(began, ends(), place.clientWidth));
      fingers.delete(event.pointerId);
      began = null;
    });
  }
}

/** What is between the ends of a plot when two fingers have moved from `before` to `after`. */
function seen([a, b], [c, d], width) {
  const scale = Math.max(b - a, 20) / Math.max(d - c, 20);
  const from = a - c * scale;
  return [from, from + width * scale];
}
