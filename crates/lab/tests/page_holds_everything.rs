//! The text of the page: nothing is loaded, foreign text is never markup, and nothing is missing.

#[allow(dead_code, reason = "each test file uses its own part of the fixture")]
mod fixture;

use blockmux_lab::page::render;
use blockmux_lab::result::Comparison;
use blockmux_lab::suite::Study;

fn page(comparison: &Comparison, study: Option<&Study>) -> String {
    render(comparison, study).unwrap()
}

#[test]
fn it_loads_nothing() {
    let html = page(&fixture::comparison(), Some(&fixture::study()));
    for forbidden in ["<script", "<link rel=\"stylesheet", "@import", "url(", "src=", "<iframe"] {
        assert!(!html.contains(forbidden), "{forbidden}");
    }
    let targets = html.split("href=\"").skip(1).map(|rest| rest.split('"').next().unwrap());
    for target in targets {
        // The link to the study, which is followed only by a click.
        if Some(target) == fixture::study().url.as_deref() {
            continue;
        }
        assert!(target == "data:," || html.contains(&format!("id=\"{}\"", &target[1..])), "{target}");
    }
}

#[test]
fn text_from_outside_is_never_markup() {
    let hostile = "<script>alert(1)</script>\"' onload=x &amp;";
    let mut comparison = fixture::comparison();
    comparison.command = hostile.into();
    comparison.suite = Some(hostile.into());
    comparison.machine.cpu = hostile.into();
    comparison.skipped.push((hostile.into(), hostile.into()));
    for row in &mut comparison.rows {
        row.configuration = hostile.into();
        row.protocol = hostile.into();
        row.poll = hostile.into();
        row.target = hostile.into();
    }
    let mut study = fixture::study();
    for text in
        [&mut study.source, &mut study.setting, &mut study.adapted, &mut study.finding, &mut study.note]
    {
        *text = hostile.into();
    }
    study.figures.iter_mut().for_each(|figure| {
        figure.label = hostile.into();
        figure.protocol = hostile.into();
    });
    let html = page(&comparison, Some(&study));
    assert!(!html.contains("<script"));
    assert!(!html.contains("\"' onload"));
    assert!(html.matches("alert(1)").count() > 50, "the text itself is shown");
}

#[test]
fn every_run_is_shown() {
    let comparison = fixture::plain_comparison();
    let html = page(&comparison, None);
    for row in &comparison.rows {
        for run in &row.runs {
            let cell = format!("<td>{}</td>", blockmux_lab::figure::measure(run.iops()));
            assert!(html.contains(&cell), "{cell}");
        }
    }
    assert_eq!(
        html.matches("<th scope=\"row\">").count(),
        comparison.rows.len() * 6,
        "a median and five runs each"
    );
}

#[test]
fn the_findings_name_the_best_protocol_and_its_rivals() {
    let html = page(&fixture::comparison(), None);
    assert!(html.contains(
        "<strong>nbd adaptive</strong>, 4 KiB random read, depth 32, 88% of its ceiling. Runs overlap with nbd always."
    ));
    assert!(html.contains("<strong>nbd always</strong>, 4 KiB random read, depth 1, p99 21.1 µs."));
}

#[test]
fn only_small_blocks_are_called_small() {
    let mut comparison = fixture::plain_comparison();
    assert!(page(&comparison, None).contains("<h2>Small I/O</h2>"));
    comparison.rows.iter_mut().for_each(|row| row.job.bs = 1 << 20);
    let html = page(&comparison, None);
    assert!(!html.contains("Small I/O") && html.contains("<h2>Throughput</h2>\n<p class=\"big\">"));
}

/// The part of the page under one heading.
fn section<'a>(html: &'a str, id: &str) -> &'a str {
    let (_, rest) = html.split_once(&format!("<section id=\"{id}\"")).unwrap_or_else(|| panic!("no {id}"));
    rest.split("</section>").next().unwrap()
}

/// The unit of each chart in a section.
fn units(section: &str) -> Vec<&str> {
    section.split("</b> <span>").skip(1).map(|rest| rest.split('<').next().unwrap()).collect()
}

#[test]
fn a_ceiling_is_a_tick_on_each_protocols_bar_and_has_no_bar() {
    let html = page(&fixture::comparison(), None);
    let rates = section(&html, "rate");
    // Nine jobs of the local volume and five configurations.
    assert_eq!(rates.matches("<rect class=\"bar ").count(), 9 * 6);
    assert_eq!(rates.matches("class=\"ceiling\"").count(), 9 * 3, "NBD's three have a ceiling: {rates}");
    assert_eq!(html.matches("raw-socket baseline").count(), 1, "it is defined once");
    for id in ["rate", "latency", "cpu"] {
        assert!(!section(&html, id).contains("ceiling s"), "no bar and no line of a ceiling in {id}");
    }
    assert!(section(&html, "figures").contains("ceiling spins"), "its figures are in the table");
}

#[test]
fn each_rate_is_shown_once_as_iops_or_as_throughput() {
    let html = page(&fixture::comparison(), None);
    let mut expected = ["IOPS"; 9];
    expected[6..].fill("MB/s");
    assert_eq!(units(section(&html, "rate")), expected);
    assert_eq!(html.matches("<figcaption>").count(), 1 + 9 + 5 + 9, "a line, rates, latency and CPU time");
}

#[test]
fn three_depths_or_block_sizes_make_lines_of_rates_and_cpu_time() {
    let html = page(&fixture::comparison(), None);
    let scaling = section(&html, "scaling");
    assert_eq!(units(scaling), ["by depth"]);
    for part in [">IOPS</text>", ">% of a core per Gbit/s</text>", "depth 32: "] {
        assert!(scaling.contains(part), "no {part} in {scaling}");
    }
    let mut comparison = fixture::comparison();
    for (nth, bs) in [1024, 2048, 4096, 8192].into_iter().enumerate() {
        let mut rows = fixture::plain_comparison().rows;
        rows.retain(|row| row.job.iodepth == 1);
        rows.iter_mut().for_each(|row| (row.job.bs, row.job.iodepth) = (bs, 7));
        comparison.rows.splice(nth * rows.len()..nth * rows.len(), rows);
    }
    let html = page(&comparison, None);
    let scaling = section(&html, "scaling");
    assert!(units(scaling).contains(&"by block size"), "{scaling}");
    assert!(scaling.contains("block size 8k: ") && scaling.contains(">MB/s</text>"), "{scaling}");
}

#[test]
fn bars_above_their_ceiling_are_hatched_with_the_reason() {
    let mut comparison = fixture::plain_comparison();
    let html = page(&comparison, None);
    assert!(!html.contains("class=\"hatch\"") && !html.contains("Hatched"));
    let is_first = |row: &&mut blockmux_lab::result::Row| row.configuration == "nbd" && row.job.iodepth == 1;
    let row = comparison.rows.iter_mut().find(is_first).unwrap();
    row.runs.iter_mut().for_each(|run| run.read.ios *= 2);
    let html = page(&comparison, None);
    let rates = section(&html, "rate");
    assert_eq!((rates.matches("class=\"hatch\"").count(), rates.matches("class=\"reason\"").count()), (1, 1));
    assert!(rates.contains("Hatched bars are above 110% of their ceiling"));
}

#[test]
fn winners_are_named_only_after_three_runs_that_agree() {
    let mut comparison = fixture::plain_comparison();
    let html = page(&comparison, None);
    assert!(html.contains("class=\"tile nbd\"") && !html.contains("class=\"banner\""));
    // The runs of one job differ: only its tiles are missing.
    let is_deep = |row: &&mut blockmux_lab::result::Row| row.configuration == "nbd" && row.job.iodepth == 32;
    let row = comparison.rows.iter_mut().find(is_deep).unwrap();
    row.runs[0].read.ios = row.runs[0].read.ios * 8 / 10;
    let html = page(&comparison, None);
    assert!(html.contains("<p>No other winner is named: "));
    assert!(
        html.contains("<li>4 KiB random read, depth 32, IOPS: the runs of nbd differ by 24%.</li>"),
        "{html}"
    );
    assert!(!html.contains("<h2>Small I/O</h2>") && html.contains("<h2>Latency</h2>\n<p class=\"big\">"));
    comparison.rows.iter_mut().for_each(|row| row.runs.truncate(2));
    let html = page(&comparison, None);
    assert!(!html.contains("class=\"tile") && html.contains("<p>No winner is named: "));
    assert!(html.contains("<li>There are fewer than 3 runs of each configuration.</li>"));
}

#[test]
fn one_depth_has_bars_of_latency_and_several_have_lines() {
    let mut comparison = fixture::comparison();
    let html = page(&comparison, None);
    let latency = section(&html, "latency");
    assert!(latency.contains("<polyline") && latency.contains("p50 / p99"));
    comparison.rows.retain(|row| row.job.iodepth == 32);
    let html = page(&comparison, None);
    assert!(!section(&html, "latency").contains("<polyline"));
    assert!(section(&html, "latency").contains("class=\"bar nbd pale\""));
}

#[test]
fn every_protocol_has_its_colour_everywhere() {
    let html = page(&fixture::comparison(), Some(&fixture::study()));
    for protocol in ["nbd", "iscsi", "nvme-tcp"] {
        for part in [
            format!("class=\"bar {protocol}"),
            format!("<i class=\"{protocol}"),
            format!("<g class=\"{protocol}"),
        ] {
            assert!(html.contains(&part), "{part}");
        }
    }
    assert!(html.contains("class=\"tile nbd\""));
}

#[test]
fn every_chart_says_what_it_shows_to_a_screen_reader() {
    let html = page(&fixture::comparison(), Some(&fixture::study()));
    let charts: Vec<&str> = html.split("<svg ").skip(1).map(|rest| rest.split('>').next().unwrap()).collect();
    assert!(charts.len() > 20);
    for chart in charts {
        let said = chart.split("aria-label=\"").nth(1).unwrap().split('"').next().unwrap();
        assert!(chart.contains("role=\"img\"") && said.len() > 60, "{chart}");
    }
    let scrolled = html.matches("<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=").count();
    assert_eq!(html.matches("<table>").count(), scrolled, "every table scrolls, by keyboard too");
}

#[test]
fn a_study_comes_first_relative_to_its_reference_with_a_link_to_it() {
    let html = page(&fixture::comparison(), Some(&fixture::study()));
    let published = section(&html, "published");
    assert!(html.find("id=\"published\"").unwrap() < html.find("id=\"findings\"").unwrap());
    assert!(published.contains("<a href=\"https://example.org/study\" rel=\"noreferrer\">"));
    assert!(published.contains("iscsi = 1.00"));
    // The study has 373,330 IOPS of iSER and 118,725 of iSCSI over 40 GbE; the shares measured here
    // are 0.88 (NBD) and 0.71 (iSCSI).
    for part in [
        "InfiniBand: published 3.14× (373k IOPS)",
        "40 GbE: published 1.00×",
        "here, adaptive: measured here 1.24×",
    ] {
        assert!(published.contains(part), "no {part:?} in {published}");
    }
    assert!(published.contains("<td>373k IOPS</td>"), "the table has the figures themselves");
    assert!(
        !html.split("id=\"findings\"").nth(1).unwrap().contains("InfiniBand"),
        "the study's figures are not among the findings"
    );
    assert!(!page(&fixture::comparison(), None).contains("id=\"published\""));
}

#[test]
fn a_study_over_links_has_one_row_for_each_link() {
    let study = blockmux_lab::suite::Suite::by_name("aatrokoski-2007").unwrap().to_study();
    let mut comparison = fixture::plain_comparison();
    comparison.rows.retain(|row| row.configuration == "nbd" && row.job.bs == 1 << 20);
    comparison.rows[0].job.name = "read".into();
    comparison.rows[0].configuration = "nbd, 1 Gbit/s, MTU 1500".into();
    let mut faster = comparison.rows[0].clone();
    faster.configuration = "nbd, 1 Gbit/s, MTU 9000".into();
    faster.runs.iter_mut().for_each(|run| run.read.bytes *= 2);
    comparison.rows.push(faster);
    let html = page(&comparison, Some(&study));
    assert!(html.contains("nbd 1 Gbit/s, MTU 1500: measured here 1.00×"), "{html}");
    assert!(html.contains("nbd 1 Gbit/s, MTU 9000: measured here 2.00× "), "{html}");
    // The study has 109 to 71 MB/s.
    assert!(html.contains("published 1.54× (109 MB/s)"));
    assert!(
        !section(&html, "published").contains("12 disks, 1 Gbit/s"),
        "only the volume that is served here"
    );
}

#[test]
fn errors_are_shown_before_anything_else() {
    let mut comparison = fixture::plain_comparison();
    comparison.rows[1].runs[0].verify_errors = 3;
    let html = page(&comparison, None);
    let error =
        html.find("nbd, 4 KiB random read, depth 1: 3 blocks had other content than was written").unwrap();
    assert!(error < html.find("id=\"findings\"").unwrap());
}

#[test]
fn many_errors_are_all_present_and_do_not_hide_the_findings() {
    let mut comparison = fixture::comparison();
    comparison.rows.iter_mut().for_each(|row| row.runs[0].errors = 1);
    let html = page(&comparison, None);
    let errors = html.split("id=\"findings\"").next().unwrap();
    assert_eq!(errors.matches("<li>").count(), comparison.rows.len());
    let (shown, folded) = errors.split_once("<details>").unwrap();
    assert_eq!(shown.matches("<li>").count(), 6);
    assert!(folded.contains(&format!("<summary>{} more</summary>", comparison.rows.len() - 6)));
    comparison.rows.truncate(6);
    let html = page(&comparison, None);
    assert!(!html.split("id=\"findings\"").next().unwrap().contains("<details>"));
}

#[test]
fn a_comparison_without_rows_makes_a_page() {
    let mut comparison = fixture::plain_comparison();
    comparison.rows.clear();
    assert!(page(&comparison, None).contains("No protocol was measured."));
    let mut comparison = fixture::plain_comparison();
    comparison.rows.iter_mut().for_each(|row| row.runs.clear());
    assert!(!page(&comparison, None).contains("NaN"));
    let mut comparison = fixture::plain_comparison();
    comparison.rows.iter_mut().for_each(|row| row.runs = vec![Default::default()]);
    let html = page(&comparison, None);
    assert!(!html.contains("NaN") && !html.contains("inf"));
}
