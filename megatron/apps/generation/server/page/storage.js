// What the browser keeps: settings and texts in localStorage, the API key in sessionStorage.

const PREFIX = "megatron.";
const KEY = `${PREFIX}api-key`;

/** The value of `name`, or `otherwise` if there is none, or none that can be read. */
export function load(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** Whether the value is kept: storage may be full or switched off. */
export function save(name, value) {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export function forgetAll() {
  for (const storage of ["localStorage", "sessionStorage"]) {
    try {
      for (const name of Object.keys(window[storage])) {
        if (name.startsWith(PREFIX)) window[storage].removeItem(name);
      }
    } catch {
      // Switched off: there is nothing to forget.
    }
  }
}

let apiKey = null; // for browsers without sessionStorage

export function loadKey() {
  try {
    return sessionStorage.getItem(KEY) ?? apiKey;
  } catch {
    return apiKey;
  }
}

export function saveKey(value) {
  apiKey = value;
  try {
    if (value === null) sessionStorage.removeItem(KEY);
    else sessionStorage.setItem(KEY, value);
  } catch {
    // It holds until the page is left.
  }
}
