"""How the HTML page looks, by light and by dark, at narrow and at wide windows."""

CSS = """
:root {
  --ground: #ffffff; --raised: #f6f8fa; --ink: #1f2328; --muted: #59636e; --line: #d1d9e0;
  --same: #116329; --same-ground: #dafbe1; --different: #a40e26; --different-ground: #ffebe9;
  --unknown: #7d4e00; --unknown-ground: #fff8c5;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #0d1117; --raised: #161b22; --ink: #e6edf3; --muted: #9198a1; --line: #3d444d;
    --same: #7ee787; --same-ground: #12261e; --different: #ffa198; --different-ground: #301b1e;
    --unknown: #e3b341; --unknown-ground: #2b2111;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 1.5rem clamp(0.75rem, 3vw, 2.5rem) 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 0.5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 0.6rem; overflow-wrap: anywhere; }
.origin, .note { color: var(--muted); font-size: 0.875rem; margin: 0.35rem 0; overflow-wrap: anywhere; }
.verdict { margin: 0.5rem 0; padding: 0.6rem 0.8rem; border-left: 4px solid; border-radius: 4px;
  overflow-wrap: anywhere; }
.verdict strong { margin-right: 0.4rem; }
.verdict b { font-weight: 600; }
.verdict.same { background: var(--same-ground); border-color: var(--same); }
.verdict.different { background: var(--different-ground); border-color: var(--different); }
.verdict.unknown { background: var(--unknown-ground); border-color: var(--unknown); }
.verdict.same strong { color: var(--same); }
.verdict.different strong { color: var(--different); }
.verdict.unknown strong { color: var(--unknown); }
.plots { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
figure { margin: 0; padding: 0.75rem; border: 1px solid var(--line); border-radius: 6px; background: var(--raised); }
figcaption { font-size: 0.9rem; font-weight: 600; margin-bottom: 0.4rem; }
figure svg { display: block; width: 100%; height: auto; color: var(--muted); }
figure svg text { font-family: inherit !important; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: 0.875rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.4rem 0.7rem; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
th { background: var(--raised); white-space: nowrap; }
td:first-child { white-space: nowrap; font-weight: 600; }
td:not(.figure):not(:first-child):not(:empty) { min-width: 10rem; }
.figure { text-align: right; white-space: nowrap; }
tbody tr:last-child td { border-bottom: 0; }
""".strip()
