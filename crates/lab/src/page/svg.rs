//! Elements of all charts: escaped text, round ticks, and a frame with a description for screen
//! readers.

use std::fmt::Write as _;

/// Width of every chart in user units. Charts are as narrow as a column, so that their text stays
/// readable on a telephone; wide screens show several side by side.
pub(super) const WIDTH: f64 = 360.0;

/// A number of user units with few digits.
pub(super) fn n(value: f64) -> String {
    let text = format!("{value:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
}

/// Text for an element or a quoted attribute.
pub(super) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// A text element; `class` is ours, `text` may be foreign.
pub(super) fn text(out: &mut String, class: &str, x: f64, y: f64, text: &str) {
    let _ = write!(out, r#"<text class="{class}" x="{}" y="{}">{}</text>"#, n(x), n(y), escaped(text));
}

/// A line element.
pub(super) fn line(out: &mut String, class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
    let _ =
        write!(out, r#"<line class="{class}" x1="{}" y1="{}" x2="{}" y2="{}"/>"#, n(x1), n(y1), n(x2), n(y2));
}

/// The `svg` element around a drawing. Screen readers speak `title` and `description` in its place.
pub(super) fn framed(height: f64, title: &str, description: &str, body: &str) -> String {
    let (title, description, height) = (escaped(title), escaped(description), n(height));
    format!(
        r#"<svg role="img" aria-label="{title}. {description}" viewBox="0 0 {WIDTH} {height}" xmlns="http://www.w3.org/2000/svg">{body}</svg>"#
    )
}

/// A round number without needless zeros: 0.5, 20, 100k, 1M.
pub(super) fn tick(value: f64) -> String {
    let units = [(1e9, "G"), (1e6, "M"), (1e3, "k")];
    let unit = units.into_iter().find(|&(unit, _)| value >= unit * 0.9999);
    let (unit, suffix) = unit.unwrap_or((1.0, ""));
    let digits = format!("{:.3}", value / unit);
    format!("{}{suffix}", digits.trim_end_matches('0').trim_end_matches('.'))
}

/// Ticks of a linear axis from 0 to at least `most`, at 1, 2 or 5 times a power of ten; at most
/// five besides 0.
pub(super) fn linear_ticks(most: f64) -> Vec<f64> {
    if !(most.is_finite() && most > 0.0) {
        return vec![0.0, 1.0];
    }
    let rough = most / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let step =
        [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power).into_iter().find(|&step| step >= rough * 0.999);
    let step = step.unwrap_or(power * 10.0);
    let count = (most / step * 0.9999).ceil().max(1.0) as u32;
    (0..=count).map(|tick| f64::from(tick) * step).collect()
}

/// Ticks of a logarithmic axis that includes both ends: 1, 2, 5 times powers of ten over a short
/// range, powers of ten over a long one.
pub(super) fn log_ticks(least: f64, most: f64) -> Vec<f64> {
    let (low, high) = (least.log10().floor() as i32, most.log10().ceil() as i32);
    let factors: &[f64] = if most / least > 60.0 { &[1.0] } else { &[1.0, 2.0, 5.0] };
    let all = (low..=high).flat_map(|power| factors.iter().map(move |factor| factor * 10f64.powi(power)));
    let all: Vec<f64> = all.collect();
    let first = all.iter().rposition(|&tick| tick <= least * 1.001).unwrap_or(0);
    let last = all.iter().position(|&tick| tick >= most * 0.999).unwrap_or(all.len() - 1);
    all[first..=last].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_reach_over_the_largest_value() {
        assert_eq!(linear_ticks(747_000.0), [0.0, 200_000.0, 400_000.0, 600_000.0, 800_000.0]);
        assert_eq!(linear_ticks(1.0), [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]);
        assert_eq!(linear_ticks(0.0), [0.0, 1.0]);
        assert_eq!(linear_ticks(f64::NAN), [0.0, 1.0]);
    }

    #[test]
    fn ticks_are_written_without_needless_zeros() {
        let written = [0.0, 0.1, 0.6000000000000001, 20.0, 1000.0, 2500.0, 1e6].map(tick);
        assert_eq!(written, ["0", "0.1", "0.6", "20", "1k", "2.5k", "1M"]);
    }

    #[test]
    fn logarithmic_ticks_enclose_the_range() {
        assert_eq!(log_ticks(10.3, 158.0), [10.0, 20.0, 50.0, 100.0, 200.0]);
        assert_eq!(log_ticks(0.5, 300.0), [0.1, 1.0, 10.0, 100.0, 1000.0]);
        assert_eq!(log_ticks(10.0, 10.0), [10.0]);
    }

    #[test]
    fn text_cannot_leave_its_element() {
        assert_eq!(escaped("<a b='c\"&"), "&lt;a b=&#39;c&quot;&amp;");
    }
}
