"""What the documents say can be run, and names every file it should."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_example_of_the_readme_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out == "(167167, 166833, 166500)\n"


def test_floor_plan_names_every_file():
    plan = (ROOT / "docs/architecture.md").read_text().split("```")[1]
    named = set(re.findall(r"\w+\.py", plan)) - {"reference.py"}
    folders = [ROOT / "cptools", ROOT / "models/glm53", ROOT / "examples"]
    there = {file.name for folder in folders for file in folder.glob("*.py")}
    assert named == there


def test_links_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} -> {target}"
