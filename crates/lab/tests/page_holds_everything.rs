//! The page's text: nothing is loaded, nothing from outside is taken for markup, and nothing is left out.

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
    for forbidden in
        ["<script", "<link rel=\"stylesheet", "@import", "url(", "src=", "href=\"http", "<iframe"]
    {
        assert!(!html.contains(forbidden), "{forbidden}");
    }
    let targets = html.split("href=\"").skip(1).map(|rest| rest.split('"').next().unwrap());
    for target in targets {
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
        row.subject = hostile.into();
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
        "<strong>nbd adaptive</strong>, 4 KiB random read, depth 32, 88% of what bare sockets reach with the same \
         messages. Their runs overlap: nbd always."
    ));
    assert!(html.contains("<strong>nbd always</strong>, 4 KiB random read, depth 1, p99 21.1 µs."));
}

#[test]
fn io_is_called_small_only_where_it_is() {
    let mut comparison = fixture::plain_comparison();
    assert!(page(&comparison, None).contains("<h2>Small I/O</h2>"));
    comparison.rows.iter_mut().for_each(|row| row.job.bs = 1 << 20);
    let html = page(&comparison, None);
    assert!(!html.contains("Small I/O") && html.contains("<h2>I/O per second</h2>\n<p class=\"big\">"));
}

#[test]
fn published_figures_stand_apart_and_only_if_there_are_any() {
    let with = page(&fixture::comparison(), Some(&fixture::study()));
    let (measured, published) = with.split_once("<section id=\"published\" class=\"published\">").unwrap();
    assert!(!measured.contains("InfiniBand"));
    let (published, figures) = published.split_once("<section id=\"figures\">").unwrap();
    assert!(published.contains("InfiniBand") && published.contains("373k"));
    assert!(!figures.contains("InfiniBand"));
    assert!(!page(&fixture::comparison(), None).contains("id=\"published\""));
}

#[test]
fn errors_are_shown_before_anything_else() {
    let mut comparison = fixture::plain_comparison();
    comparison.rows[1].runs[0].verify_errors = 3;
    let html = page(&comparison, None);
    let trouble =
        html.find("nbd, 4 KiB random read, depth 1: 3 blocks did not hold what was written").unwrap();
    assert!(trouble < html.find("id=\"findings\"").unwrap());
}

#[test]
fn many_errors_leave_the_findings_in_sight_and_are_all_there() {
    let mut comparison = fixture::comparison();
    comparison.rows.iter_mut().for_each(|row| row.runs[0].errors = 1);
    let html = page(&comparison, None);
    let troubles = html.split("id=\"findings\"").next().unwrap();
    assert_eq!(troubles.matches("<li>").count(), comparison.rows.len());
    let (shown, folded) = troubles.split_once("<details>").unwrap();
    assert_eq!(shown.matches("<li>").count(), 6);
    assert!(folded.contains(&format!("<summary>{} more</summary>", comparison.rows.len() - 6)));
    comparison.rows.truncate(6);
    let html = page(&comparison, None);
    assert!(!html.split("id=\"findings\"").next().unwrap().contains("<details>"));
}

#[test]
fn nothing_measured_makes_a_page_too() {
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
