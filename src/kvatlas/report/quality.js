"use strict";
/* Shows one of several tables, as the reader chooses; without a script all of them are there. */
for (const select of document.querySelectorAll("[data-switch]")) {
  const parts = [...select.closest("section").querySelectorAll("[data-part]")];
  const show = () => parts.forEach((part) => { part.hidden = part.dataset.part !== select.value; });
  select.addEventListener("change", show);
  show();
}
