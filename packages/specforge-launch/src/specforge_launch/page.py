"""The page that a report fills: `title`, `note`, `tiles`, `figures`, `table`, `configuration`: all HTML."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{title} · specforge</title>
<style>
:root {{
  --ink: #1e293b; --soft: #64748b; --page: #f1f5f9; --card: #ffffff; --line: #e2e8f0;
  --accent: #0f766e;
}}
@media (prefers-color-scheme: dark) {{
  :root {{
    --ink: #e2e8f0; --soft: #94a3b8; --page: #0b1220; --card: #131c2e; --line: #24324b;
    --accent: #2dd4bf;
  }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }}
main {{ max-width: 1180px; margin: 0 auto; padding: 2.2rem 1.2rem 4rem; }}
h1 {{ font-size: 1.7rem; margin: 0; letter-spacing: -.02em; }}
h2 {{ font-size: 1.05rem; margin: 0 0 .6rem; }}
.kind, .note {{ color: var(--soft); margin: .1rem 0 1.4rem; }}
.warning {{
  background: var(--card); border: 1px solid #f59e0b; border-radius: 12px; padding: .7rem 1.1rem;
}}
.tiles {{
  display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .9rem;
  margin-bottom: .9rem;
}}
.tiles div, figure, section, details {{
  background: var(--card); border: 1px solid var(--line); border-radius: 12px;
}}
.tiles div {{ padding: .8rem 1.1rem; }}
.tiles b {{
  display: block; font-size: 1.6rem; letter-spacing: -.02em; color: var(--accent);
  font-variant-numeric: tabular-nums;
}}
.tiles span, figcaption span {{ color: var(--soft); font-size: .85rem; }}
.grid {{
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: .9rem;
}}
figure {{ margin: 0; padding: 1rem 1.1rem .6rem; }}
figcaption b {{ display: block; }}
svg {{ width: 100%; height: auto; color: var(--ink); }}
svg text {{ font-family: system-ui, sans-serif !important; }}
section, details {{ padding: 1rem 1.1rem; }}
details {{ margin-top: .9rem; }}
summary {{ cursor: pointer; font-weight: 600; }}
table {{ border-collapse: collapse; width: 100%; font-size: .92rem; }}
th {{
  text-align: left; font-weight: 400; color: var(--soft); padding: .3rem 1rem .3rem 0;
  white-space: nowrap; vertical-align: top;
}}
td {{ text-align: right; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }}
tr + tr > * {{ border-top: 1px solid var(--line); }}
pre {{ overflow-x: auto; font-size: .82rem; line-height: 1.45; }}
</style></head><body><main>
<h1>{title}</h1><p class="kind">draft model for speculative decoding</p>
{note}
{tiles}
<div class="grid">
{figures}
{table}
</div>
<details><summary>Configuration</summary><pre>{configuration}</pre></details>
</main></body></html>
"""
