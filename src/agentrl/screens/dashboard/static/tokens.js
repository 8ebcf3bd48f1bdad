// Shows what is known of the token under the pointer or with the focus; arrow keys move from token to token.

const box = document.querySelector(".tokens");
const detail = document.getElementById("token-detail");

function show(token) {
  if (token) detail.textContent = `${JSON.stringify(token.textContent)} · ${token.dataset.detail}`;
}

if (box && detail) {
  const tokens = [...box.querySelectorAll("[data-detail]")];
  tokens.forEach((token, index) => {
    token.tabIndex = index ? -1 : 0;
    token.removeAttribute("title");
  });
  box.addEventListener("pointerover", (event) => show(event.target.closest("[data-detail]")));
  box.addEventListener("focusin", (event) => show(event.target.closest("[data-detail]")));
  box.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    const index = tokens.indexOf(event.target.closest("[data-detail]"));
    if (by === undefined || index < 0) return;
    event.preventDefault();
    const next = tokens[Math.min(tokens.length - 1, Math.max(0, index + by))];
    tokens[index].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
}
