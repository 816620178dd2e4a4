// The colours that were chosen, before anything is drawn. Not a module: modules run too late.
"use strict";

(() => {
  const KEY = "megatron.theme";
  const CHOICES = ["auto", "light", "dark"];

  function stored() {
    try {
      const choice = localStorage.getItem(KEY);
      return CHOICES.includes(choice) ? choice : "auto";
    } catch {
      return "auto"; // storage is switched off
    }
  }

  function apply(choice) {
    document.documentElement.dataset.theme = choice;
  }

  apply(stored());

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");

    function name(choice) {
      const [sign, words] = { auto: "◐ Auto", light: "☀\ufe0e Light", dark: "☾ Dark" }[choice].split(" ");
      button.replaceChildren(sign, Object.assign(document.createElement("span"), { textContent: ` ${words}` }));
      button.setAttribute("aria-label", `Colours: ${choice}`);
      button.title = "Colours: as the system has them, light or dark";
    }

    button.addEventListener("click", () => {
      const next = CHOICES[(CHOICES.indexOf(document.documentElement.dataset.theme) + 1) % 3];
      apply(next);
      name(next);
      try {
        localStorage.setItem(KEY, next);
      } catch {
        // It holds until the page is left.
      }
    });
    document.addEventListener("forgotten", () => {
      apply("auto");
      name("auto");
    });
    name(document.documentElement.dataset.theme);
  });
})();
