"""The bench of three levels at a short length: every row counts the entries that the formulas give."""

from mmsdk.apps.bench.levels import Levels


def test_a_short_run_holds_what_the_rates_say() -> None:
    tokens = 5000
    rows = Levels(tokens=tokens, chunk=700)()
    assert len({tuple(row) for row in rows}) == 1
    small = {row["level"]: row for row in rows if str(row["model"]).startswith("small")}
    entries = {"window": 128, "csa": tokens // 4, "indexer": tokens // 4, "hca": tokens // 128}
    assert {level: small[level]["entries"] for level in entries} == entries
    assert small["hca"]["bytes"] == tokens // 128 * 16 * 4 and small["csa"]["bytes"] == tokens // 4 * 16 * 4
    assert small["all"]["bytes"] == sum(int(str(row["bytes"])) for level, row in small.items() if level != "all")
    assert {str(row["model"]).split(",")[0] for row in rows} == {"small", "v4-flash", "v4-pro"}


def test_the_published_sizes_hold_a_million_tokens_in_a_fraction_of_the_memory() -> None:
    rows = {(str(row["model"]).split(",")[0], row["level"]): row for row in Levels(tokens=1_000_000 // 64, chunk=4096)()}
    # Flash: 20 HCA layers of 128 to 1, 21 CSA layers of 4 to 1
    assert rows["v4-flash", "hca"]["layers"] == 20 and rows["v4-flash", "csa"]["layers"] == 21
    assert rows["v4-pro", "hca"]["layers"] == 31 and rows["v4-pro", "csa"]["layers"] == 30
