// Text that leaves the window or lies on other text, as sentences. Tables scroll sideways on their own,
// and the bar of switches may lie on what scrolls under it.
(() => {
  const faults = [], boxes = [], wide = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > wide) faults.push("the page is wider than the window");
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, parent = node.parentElement;
    if (!node.data.trim() || parent.closest("option,script") || !parent.checkVisibility()) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const drawn = parent.namespaceURI.endsWith("svg");
    const rects = drawn ? [parent.getBoundingClientRect()] : range.getClientRects();
    for (const box of rects) if (box.width) boxes.push({node, text: node.data.trim().slice(0, 40), box});
  }
  for (const {node, text, box} of boxes) {
    const svg = node.parentElement.closest("svg.picture"), sheet = node.parentElement.closest(".sheet");
    const window = {left: 0, right: wide, top: -Infinity, bottom: Infinity};
    const around = svg ? svg.getBoundingClientRect() : window;
    const across = box.left < around.left - 1 || box.right > around.right + 1;
    if (!sheet && (across || box.top < around.top - 1 || box.bottom > around.bottom + 1))
      faults.push(`outside: ${text}`);
  }
  // what a legend of many runs has scrolled away
  const shown = boxes.filter(({node, box}) => {
    const runs = node.parentElement.closest(".runs")?.getBoundingClientRect();
    return !runs || (box.top >= runs.top - 1 && box.bottom <= runs.bottom + 1);
  });
  boxes.splice(0, boxes.length, ...shown);
  boxes.sort((a, b) => a.box.top - b.box.top);
  boxes.forEach((one, i) => {
    for (let k = i + 1; k < boxes.length && boxes[k].box.top < one.box.bottom - 3; k++) {
      const other = boxes[k];
      const across = other.box.left < one.box.right - 1 && one.box.left < other.box.right - 1;
      if (other.node !== one.node && across)
        faults.push(`overlap: ${one.text} | ${other.text}`);
    }
  });
  return faults;
})()
