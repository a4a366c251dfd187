//! The table as it is printed, compared character by character.

#[allow(dead_code, reason = "each test file uses its own part of the fixture")]
mod fixture;

use blockmux_lab::result::{Comparison, ConfigurationKind};
use blockmux_lab::suite::{PublishedFigure, Unit};
use blockmux_lab::table::{Colour, Width, render};

const EIGHTY: &str = "\
AMD EPYC, 2 cores, 7.8 GiB, Linux 6.18.44, TCP by cubic
2026-11-21T12:00:00Z  blockmux bench mem:1G --runs 5 --runtime 2

4 KiB random read, depth 1
                               ──────── latency, us ────────  CPU us/IO
                IOPS  ±%  MB/s  mean   p50   p99 p99.9   max  tgt  ini %/Gb ceil
local mem      2.09M   2  8579  0.47  0.45  0.91  1.92  14.5    - 0.96 2.93    -
nbd            86.6k   2   355  11.3  10.9  22.1  46.4   351 8.03 8.77 51.3  91%
    ! 2 I/O failed
ceiling sleeps 14.3k   2  58.5  68.6  65.9   134   281  2127 11.0 10.2 64.7    -
ceiling spins  95.2k   2   390  10.3  9.88  20.1  42.2   319 7.64 7.58 46.4    -

4 KiB random read, depth 32
                               ──────── latency, us ────────  CPU us/IO
                IOPS  ±%  MB/s  mean   p50   p99 p99.9   max  tgt  ini %/Gb ceil
local mem      5.90M   2 24172  5.31  5.10  10.4  21.8   165    - 0.17 0.52    -
nbd             657k   2  2693  47.7  45.8  93.0   196  1479 1.42 1.55 9.06  88%
ceiling sleeps  414k   2  1695  75.8  72.7   148   311  2349 1.95 1.80 11.4    -
ceiling spins   747k   2  3060  42.0  40.3  81.9   172  1301 1.35 1.34 8.21    -

1 MiB sequential read, depth 32
                               ──────── latency, us ────────  CPU us/IO
                IOPS  ±%  MB/s  mean   p50   p99 p99.9   max  tgt  ini %/Gb ceil
local mem      10.1k   2 10570  3111  2987  6067 12756 96444    - 2.72 0.03    -
nbd            3.70k   2  3876  8485  8145 16545 34788  263k 22.7 24.8 0.57  88%
ceiling sleeps 2.33k   2  2440 13478 12939 26282 55259  418k 31.2 28.8 0.72    -
ceiling spins  4.20k   2  4404  7467  7168 14560 30613  231k 21.6 21.4 0.51    -

Not run
no such protocol yet: iser, 4 KiB random read

Medians of 5 runs of 2 s.
±%: half the range of the runs. Latency: submit to completion. tgt, ini: CPU
time of target and initiator. %/Gb: per cent of a core, both sides, for each
Gbit/s of payload. ceil: share of the IOPS of bare sockets with the same message
sizes and the same polling (never: the one that sleeps, always: the one that
spins, adaptive: the faster of the two).
";

#[test]
fn one_protocol_fits_eighty_columns_completely() {
    let mut comparison = fixture::plain_comparison();
    comparison.rows[1].runs[0].errors = 2;
    comparison.skipped.push(("iser, 4 KiB random read".into(), "no such protocol yet".into()));
    assert_eq!(render(&comparison, None, Width(80), Colour::Off), EIGHTY);
}

#[test]
fn a_row_without_runs_is_in_every_report() {
    let mut comparison = fixture::plain_comparison();
    comparison.rows[1].runs.clear();
    comparison.skipped.push(("4 KiB random read, nbd".into(), "no rate".into()));
    let text = render(&comparison, None, Width(80), Colour::Off);
    let line = text.lines().find(|line| line.starts_with("nbd ")).unwrap();
    assert!(line.chars().all(|c| "nbd -".contains(c)), "{line}");
    assert!(text.contains("no rate: 4 KiB random read, nbd") && text.contains("Medians of 5 runs"), "{text}");
    let page = blockmux_lab::page::render(&comparison, None).unwrap();
    assert!(page.contains("nbd</th><td>0</td><td>–</td>") && page.contains("<dt>no rate</dt>"));
    let json = blockmux_lab::fio_json::to_json(&comparison);
    assert_eq!(blockmux_lab::fio_json::from_json(&json).unwrap(), comparison);
}

#[test]
fn rows_that_were_not_run_for_one_reason_have_a_line_each() {
    let mut comparison = fixture::plain_comparison();
    for block in ["4 KiB", "1 MiB"] {
        comparison.skipped.push((format!("iser, {block} random read"), "no such protocol yet".into()));
    }
    let text = render(&comparison, None, Width(80), Colour::Off);
    let lines = "Not run\nno such protocol yet:\n  iser, 4 KiB random read\n  iser, 1 MiB random read\n\n";
    assert!(text.contains(lines), "{text}");
}

#[test]
fn the_policy_is_shown_where_rows_differ_in_place_of_the_rarest_latencies() {
    let text = render(&fixture::comparison(), None, Width(80), Colour::Off);
    let block = "\
4 KiB random read, depth 32
                                  ───── latency, us ─────  CPU us/IO
                   IOPS  ±%  MB/s  mean   p50   p99   max  tgt  ini %/Gb ceil
local mem         5.90M   2 24172  5.31  5.10  10.4   165    - 0.17 0.52    -
nbd adaptive       657k   2  2693  47.7  45.8  93.0  1479 1.42 1.55 9.06  88%
nbd always         650k   2  2662  48.3  46.3  94.1  1496 1.51 1.62 9.55  87%
nbd never          381k   2  1560  82.3  79.0   161  2552 1.96 1.91 11.8  92%
";
    assert!(text.contains(block), "{text}");
}

#[test]
fn a_studys_figures_are_in_the_columns_of_their_unit() {
    let mut study = fixture::study();
    study.figures[0].approximate = true;
    study
        .figures
        .insert(1, PublishedFigure { value: 309.2, unit: Unit::MbPerSecond, ..study.figures[0].clone() });
    let text = render(&fixture::plain_comparison(), Some(&study), Width(80), Colour::Off);
    let lines = "\
ceiling spins   747k   2  3060  42.0  40.3  81.9   172  1301 1.35 1.34 8.21    -
published     ~75.5k      ~309        iscsi, 10 GbE
published       119k                  iscsi, 40 GbE
published       373k                  iser, InfiniBand

";
    assert!(text.contains(lines), "{text}");
    assert_eq!(text.matches("\npublished  ").count(), 3, "only next to the job that they belong to");
    let narrow = render(&fixture::plain_comparison(), Some(&study), Width(46), Colour::Off);
    assert!(narrow.lines().all(|line| line.chars().count() <= 46), "{narrow}");
}

#[test]
fn a_share_above_the_ceiling_is_called_noise() {
    let mut comparison = fixture::plain_comparison();
    assert!(!render(&comparison, None, Width(80), Colour::Off).contains("noise"));
    for run in comparison.rows.iter_mut().filter(|row| row.kind.is_ceiling()).flat_map(|row| &mut row.runs) {
        run.runtime_ns *= 2;
    }
    let text = render(&comparison, None, Width(80), Colour::Off).replace('\n', " ");
    assert!(text.contains("A share well over 100% is noise"), "{text}");
}

#[test]
fn a_congestion_control_that_paces_is_warned_of_where_tcp_was_measured() {
    let said = |comparison: &Comparison| {
        let text = render(comparison, None, Width(80), Colour::Off);
        let page = blockmux_lab::page::render(comparison, None).unwrap();
        assert_eq!(text.contains("--congestion cubic"), page.contains("--congestion cubic"));
        text.contains("--congestion cubic")
    };
    let mut comparison = fixture::plain_comparison();
    assert!(!said(&comparison));
    comparison.machine.congestion = "bbr".into();
    assert!(said(&comparison));
    for row in &mut comparison.rows {
        row.protocol = if row.kind.is_ceiling() { "nbd+unix".into() } else { "aoe".into() };
    }
    assert!(!said(&comparison));
}

#[test]
fn no_line_is_wider_than_requested() {
    let mut comparison = fixture::comparison();
    comparison.rows[1].configuration = "a configuration with a name that goes on and on".into();
    for width in [40, 60, 72, 80, 100, 200] {
        let text = render(&comparison, None, Width(width), Colour::Off);
        let widest = text.lines().map(|line| line.chars().count()).max().unwrap();
        assert!(widest <= width, "{widest} > {width}");
        assert!(text.contains("IOPS") && text.contains("ceil"));
    }
    assert!(render(&comparison, None, Width(120), Colour::Off).contains(" p50 "));
}

#[test]
fn a_number_too_long_for_its_column_does_not_touch_its_neighbour() {
    let mut comparison = fixture::plain_comparison();
    // A ceiling of a few I/O, as on a busy machine.
    for run in &mut comparison.rows[1].runs {
        let ios = run.ios();
        run.target_cpu_ns = Some(ios * 36_360_000);
        run.initiator_cpu_ns = Some(ios * 36_900);
    }
    let text = render(&comparison, None, Width(80), Colour::Off);
    let line = text.lines().find(|line| line.starts_with("nbd ")).unwrap();
    assert!(line.ends_with(" 36360 36.9 111k 91%"), "{line}");
}

#[test]
fn colour_adds_only_escape_sequences() {
    let mut comparison = fixture::plain_comparison();
    comparison.rows[1].runs[0].errors = 2;
    let coloured = render(&comparison, None, Width(80), Colour::Ansi);
    assert!(coloured.contains("\x1b[1m4 KiB random read, depth 1\x1b[0m"));
    assert!(coloured.contains("\x1b[31m    ! 2 I/O failed\x1b[0m"));
    let stripped = ["\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[31m"]
        .iter()
        .fold(coloured, |text, code| text.replace(code, ""));
    assert_eq!(stripped, render(&comparison, None, Width(80), Colour::Off));
}

#[test]
fn names_cannot_send_escape_sequences_to_the_terminal() {
    let mut comparison = fixture::plain_comparison();
    comparison.rows[1].configuration = "\x1b[2Jnbd".into();
    comparison.command = "\x07".into();
    comparison.machine.cpu = "\x1b]0;x".into();
    comparison.skipped.push(("\n".into(), "\r".into()));
    let text = render(&comparison, None, Width(80), Colour::Off);
    assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
}

#[test]
fn a_run_without_completions_is_reported() {
    let mut comparison = fixture::plain_comparison();
    comparison.rows[1].runs[0].read = blockmux_lab::result::Direction::default();
    let text = render(&comparison, None, Width(80), Colour::Off);
    assert!(text.contains("    ! no I/O completed in 1 of 5 runs\n"), "{text}");
}

#[test]
fn one_run_has_no_spread_and_no_rows_are_reported() {
    let mut comparison = fixture::plain_comparison();
    comparison.rows.retain(|row| row.kind == ConfigurationKind::Protocol);
    comparison.rows.truncate(1);
    comparison.rows[0].runs.truncate(1);
    let text = render(&comparison, None, Width(80), Colour::Off);
    assert!(text.contains("nbd            85.3k   -   350"), "{text}");
    assert!(text.contains("Single runs, without a spread, of 2 s."), "{text}");
    comparison.rows.clear();
    assert!(render(&comparison, None, Width(80), Colour::Off).contains("Nothing was measured."));
}
