// Figures on the reader's screen. Python does not know its width: a title is broken into lines that fit, and what would
// lie on top of something else (legend and title, slider and axis title) is moved apart. The rest of a figure stays.
(() => {
  const pen = document.createElement("canvas").getContext("2d");
  const box = (g, query) => [...g.querySelectorAll(query)].map(e => e.getBoundingClientRect()).filter(b => b.width);

  const broken = (text, font, width) => {             // greedily, at spaces; breaks of the author stay
    pen.font = `${font.size}px ${font.family}`;
    return text.split("<br>").map(line => line.split(" ").reduce((lines, word) => {
      const longer = lines.length ? `${lines.at(-1)} ${word}` : word;
      return pen.measureText(longer).width <= width && lines.length ? [...lines.slice(0, -1), longer] : [...lines, word];
    }, []).join("<br>")).join("<br>");
  };
  const lines = text => text.split("<br>").length;

  async function settle(g) {
    const first = g.first ??= {height: g._fullLayout.height, named: Object.keys(g.layout).filter(k => g.layout[k]?.ticktext), title: g.layout.title?.text ?? "", pad: {...g.layout.sliders?.[0].pad},
                               axes: Object.fromEntries(Object.keys(g.layout).filter(k => /^xaxis/.test(k)).map(k => [k, g.layout[k].title?.text]))};
    const width = g.clientWidth, change = {}, frames = g._transitionData?._frames ?? [], L = g._fullLayout;
    const font = L.title.font, title = text => broken(text, font, width - 16);
    let rows = first.title && lines(title(first.title));
    for (const f of frames) {
      delete f.layout?.height;                        // the place of a figure keeps its size
      if (!f.layout?.title?.text) continue;
      f.whole ??= f.layout.title.text;
      f.layout.title.text = title(f.whole);
      rows = Math.max(rows, lines(f.layout.title.text));
    }
    const shown = frames.length && frames[L.sliders?.[0]?.active]?.whole || first.title;
    for (const [k, text] of Object.entries(first.axes)) if (text && L[k]._length) change[`${k}.title.text`] = broken(text, L[k].title.font, L[k]._length + 20);
    for (const k of Object.keys(L).filter(k => /^yaxis/.test(k) && L[k].type === "category" && !first.named.includes(k))) {
      const all = [...new Set([...L[k]._categories, ...frames.flatMap(f => f.data ?? []).flatMap(t => t.orientation === "h" ? t.y ?? [] : [])])];
      change[`${k}.tickvals`] = all;
      const small = {...L[k].tickfont, size: width < 500 ? 10 : 13};
      change[`${k}.tickfont.size`] = small.size;
      change[`${k}.ticktext`] = all.map(c => broken(`${c}`, small, .42 * width));
    }
    for (const k of Object.keys(L).filter(k => /^xaxis/.test(k))) {
      const {type, _length, ticktext, tickangle} = L[k];
      if (type === "log" && _length < 200) change[`${k}.dtick`] = 1;
      if (ticktext && tickangle !== -90) change[`${k}.tickfont.size`] = Math.max(7, Math.min(12, 1.2 * _length / ticktext.length));
    }
    first.notes ??= (L.annotations ?? []).map(a => a.font.size);
    (L.annotations ?? []).forEach((a, i) => {         // names of the parts of a figure: centred on a part, they stay inside the whole
      if (a.xref !== "paper" || a.showarrow || a.xanchor !== "center") return;
      const middle = L._size.l + a.x * L._size.w, room = 2 * Math.min(middle, width - middle) - 4;
      pen.font = `${first.notes[i]}px ${a.font.family}`;
      change[`annotations[${i}].font.size`] = first.notes[i] * Math.min(1, room / Math.max(...a.text.split("<br>").map(t => pen.measureText(t).width)));
    });
    if (first.title) change["title.text"] = title(shown);
    if (L.showlegend && L.legend.orientation === "h") Object.assign(change, {"legend.y": 1.02, "legend.yanchor": "bottom"});
    if (g.layout.sliders) change["sliders[0].pad"] = {...first.pad};
    await Plotly.relayout(g, change);

    const head = 8 + 1.3 * font.size * rows, keys = box(g, ".legend")[0], subtitle = Math.max(0, ...(L.annotations ?? []).filter(a => a.y > .99 && a.yref === "paper").map(a => 6 + 16 * lines(a.text)));
    const top = head + (keys && g._fullLayout.legend.y > 1 ? keys.height + 10 : 0) + subtitle + 4, pad = {...first.pad};
    let far = false, small;
    if (g._fullLayout.sliders?.[0]?.visible) {       // a slider of one step is not drawn
      const value = box(g, ".slider-group > .slider-label")[0], left = g.getBoundingClientRect().left;
      const low = Math.max(...box(g, "[class^=x][class$=title], [class^=x][class$=tick]").map(b => b.bottom));
      const {steps, font: {size, family}, currentvalue: {prefix, font: said}} = g._fullLayout.sliders[0], {l, w} = g._fullLayout._size;
      first.said ??= said.size;
      pen.font = `${size}px ${family}`;
      if (value) pad.t += Math.max(0, low + 6 - value.top);
      far = value?.right > left + width;
      pad.r = (pad.r ?? 0) + Math.max(0, pen.measureText(steps.at(-1).label).width / 2 + 4 - (width - l - w));
      pen.font = `${first.said}px ${said.family}`;
      small = first.said * Math.min(1, (l + w - pad.r - 8) / Math.max(...steps.map(s => pen.measureText(`${prefix ?? ""}${s.label}`).width)));
    }
    const height = Math.round(first.height + top - 60 + (pad.t ?? 0) - (first.pad.t ?? 0));
    for (const e of [g, g.parentElement]) e.style.height = `${height}px`;
    await Plotly.relayout(g, {autosize: true, height: null, "margin.t": top, "title.y": 1 - 1.3 * font.size / height, "title.yref": "container", "title.yanchor": "bottom",
                              ...g.layout.sliders && {"sliders[0].pad": pad, "sliders[0].currentvalue.xanchor": far ? "right" : "left", "sliders[0].currentvalue.font.size": small}});
    g.settled = width;                                // for who waits
  }

  const all = async () => { for (const g of document.querySelectorAll(".plotly-graph-div")) if (g._fullLayout) await settle(g); };
  let waiting;
  addEventListener("load", () => setTimeout(all, 0));
  addEventListener("resize", () => {
    for (const g of document.querySelectorAll(".plotly-graph-div")) if (g.first && g.layout.sliders) g.layout.sliders[0].pad = {...g.first.pad};    // made for another width
    clearTimeout(waiting); waiting = setTimeout(all, 200);
  });
})();
