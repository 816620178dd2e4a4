// Elements. Text becomes text nodes and nothing else, so no answer of a model is ever markup.

/**
 * An element with attributes and children. `on...` adds a listener, `true` an empty attribute;
 * `false`, `null` and `undefined` leave an attribute or child out.
 */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value == null) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child != null && child !== false));
  return made;
}

export const byId = (id) => document.getElementById(id);

/** Copies a text, also where the page came over plain HTTP and has no clipboard of its own. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const focused = document.activeElement;
    const field = element("textarea", { class: "unseen", "aria-hidden": "true", readonly: true });
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    focused?.focus();
    return done;
  }
}
