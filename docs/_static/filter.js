// A search field above the table of models: it hides the rows that do not contain the text.
document.addEventListener("DOMContentLoaded", () => {
  const table = document.querySelector("#every-model-that-was-tried table");
  if (!table) return;
  const rows = [...table.querySelectorAll("tbody tr")];
  const field = Object.assign(document.createElement("input"), { type: "search", placeholder: "for example qwen" });
  const label = Object.assign(document.createElement("label"), { className: "filter" });
  const count = document.createElement("output");
  label.append("Model: ", field, " ", count);
  const show = () => {
    const wanted = field.value.trim().toLowerCase();
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
  };
  field.addEventListener("input", show);
  show();
  (table.closest(".table-wrapper") || table).before(label);
});
