//! A study's figures and those measured here, each relative to the same protocol: dots on a
//! logarithmic axis, on which half and double are equally far from 1.

use super::svg::{escaped, framed, line, n, text, tick};
use crate::figure::shortened;
use crate::result::{ConfigurationKind, Row};
use std::fmt::Write as _;

/// One chart.
pub(super) struct Ratios {
    pub(super) title: String,
    /// Rows under one heading each.
    pub(super) groups: Vec<(String, Vec<Ratio>)>,
}

/// One row: a dot for the value measured here, and one for the published value.
pub(super) struct Ratio {
    pub(super) label: String,
    pub(super) class: &'static str,
    pub(super) measured: Option<Value>,
    pub(super) published: Option<Value>,
}

/// A value, and its ratio to the reference.
#[derive(Clone)]
pub(super) struct Value {
    pub(super) ratio: f64,
    /// The value with its unit.
    pub(super) shown: String,
}

/// A protocol has the same colour in every report and over any sockets. In a merged report the
/// file's name follows the protocol's.
pub(super) fn protocol_class(protocol: &str) -> &'static str {
    match protocol.split([' ', '+']).next().unwrap_or_default() {
        "nbd" => "nbd",
        "iscsi" => "iscsi",
        "nvme-tcp" => "nvme-tcp",
        "iser" => "iser",
        "srp" => "srp",
        "nvme-rdma" => "nvme-rdma",
        "aoe" => "aoe",
        "" | "local" => "local",
        _ => "other",
    }
}

/// The classes of a row: its colour, with a shade of its own in a second report, and its polling
/// policy, which is shown by shade and dash.
pub(super) fn class(row: &Row) -> String {
    let colour = match row.kind {
        ConfigurationKind::Local => "local",
        ConfigurationKind::CeilingSleeping
        | ConfigurationKind::CeilingSpinning
        | ConfigurationKind::Protocol
        | ConfigurationKind::Device => protocol_class(&row.protocol),
    };
    let poll = match row.poll.as_str() {
        "always" => " poll-always",
        "never" => " poll-never",
        _ => "",
    };
    // The second of two merged reports, and every other one of more.
    let report = if row.report.is_multiple_of(2) { "" } else { " second" };
    format!("{colour}{poll}{report}")
}

impl Ratios {
    /// The chart; empty if there is no dot.
    pub(super) fn draw(&self) -> String {
        let Some(axis) = Axis::over(self.ratios(), self.left()) else { return String::new() };
        let mut body = String::new();
        let mut y = HEAD;
        for (heading, rows) in &self.groups {
            text(&mut body, "heading", 0.0, y + 15.0, &shortened(heading, HEADING_CHARS));
            y += 21.0;
            for row in rows {
                draw_row(&mut body, row, y, &axis);
                y += ROW;
            }
            y += 4.0;
        }
        let mut out = String::new();
        for &at in &axis.ticks {
            let class = if (at - 1.0).abs() < 1e-9 { "reference" } else { "grid" };
            line(&mut out, class, (axis.x(at), HEAD), (axis.x(at), y));
        }
        for &at in axis.labelled() {
            text(&mut out, "tick mid", axis.x(at), y + 14.0, &format!("{}×", tick(at)));
        }
        for (class, name, end, width) in
            [("here", "here", MEASURED_END, 34.0), ("there", "published", PUBLISHED_END, 65.0)]
        {
            let _ =
                write!(out, r#"<circle class="{class} sample" cx="{}" cy="9" r="{DOT}"/>"#, n(end - width));
            text(&mut out, "tick end", end, 13.0, name);
        }
        framed(y + 20.0, &self.title, &self.description(), &(out + &body))
    }

    /// The start of the axis, after the longest label.
    fn left(&self) -> f64 {
        let labels = self.groups.iter().flat_map(|(_, rows)| rows).map(|row| row.label.chars().count());
        labels.max().unwrap_or(0).clamp(4, LABEL_CHARS) as f64 * CHAR + 2.0 * DOT + 4.0
    }

    fn ratios(&self) -> impl Iterator<Item = f64> {
        let rows = self.groups.iter().flat_map(|(_, rows)| rows);
        rows.flat_map(|row| [&row.measured, &row.published]).flatten().map(|value| value.ratio)
    }

    fn description(&self) -> String {
        let rows = self.groups.iter().flat_map(|(name, rows)| rows.iter().map(move |row| (name, row)));
        let words = rows.map(|(name, row)| format!("{name} {}", in_words(row)));
        words.collect::<Vec<_>>().join("; ")
    }
}

fn in_words(row: &Ratio) -> String {
    let of = |value: &Option<Value>, name: &str| {
        let value = value.as_ref()?;
        Some(format!("{name} {} ({})", times(value.ratio), value.shown))
    };
    let parts = [of(&row.measured, "measured here"), of(&row.published, "published")];
    format!("{}: {}", row.label, parts.into_iter().flatten().collect::<Vec<_>>().join(", "))
}

fn draw_row(out: &mut String, row: &Ratio, y: f64, axis: &Axis) {
    let (middle, class) = (y + ROW / 2.0, row.class);
    let _ = write!(out, r#"<g class="{class}"><title>{}</title>"#, escaped(&in_words(row)));
    text(out, "label", axis.left - 8.0, middle + 4.0, &shortened(&row.label, LABEL_CHARS));
    for (value, kind, end) in
        [(&row.published, "there", PUBLISHED_END), (&row.measured, "here", MEASURED_END)]
    {
        let Some(value) = value else { continue };
        let x = axis.x(value.ratio);
        line(out, &format!("stem {kind}"), (axis.x(1.0), middle), (x, middle));
        let _ = write!(out, r#"<circle class="{kind}" cx="{}" cy="{}" r="{DOT}"/>"#, n(x), n(middle));
        text(out, &format!("ratio {kind}"), end, middle + 4.0, &times(value.ratio));
    }
    out.push_str("</g>");
}

/// A ratio with at most three digits: 0.66×, 3.09×, 24.1×, 131×.
fn times(ratio: f64) -> String {
    match ratio {
        ratio if ratio < 9.995 => format!("{ratio:.2}×"),
        ratio if ratio < 99.95 => format!("{ratio:.1}×"),
        ratio => format!("{ratio:.0}×"),
    }
}

/// A logarithmic axis around 1.
struct Axis {
    /// Powers of two, or of ten over a long range; 1 is among them.
    ticks: Vec<f64>,
    /// Start of the axis.
    left: f64,
}

impl Axis {
    /// An axis from `left` on that contains all of `ratios`; `None` if there are none.
    fn over(ratios: impl Iterator<Item = f64>, left: f64) -> Option<Axis> {
        let ratios: Vec<f64> = ratios.filter(|ratio| ratio.is_finite() && *ratio > 0.0).collect();
        let most = ratios.iter().copied().reduce(f64::max)?;
        let least = ratios.iter().copied().fold(1.0, f64::min);
        let most = most.max(1.0);
        let base: f64 = if most / least > 300.0 { 10.0 } else { 2.0 };
        // A value that equals a tick except for rounding ends the axis there.
        let low = (least.ln() / base.ln() + 0.01).floor().min(-1.0) as i32;
        let high = (most.ln() / base.ln() - 0.01).ceil().max(1.0) as i32;
        Some(Axis { ticks: (low..=high).map(|power| base.powi(power)).collect(), left })
    }

    fn x(&self, ratio: f64) -> f64 {
        let (low, high) = (self.ticks[0], self.ticks[self.ticks.len() - 1]);
        let along = (ratio.max(f64::MIN_POSITIVE) / low).ln() / (high / low).ln();
        self.left + along.clamp(0.0, 1.0) * (PLOT_RIGHT - self.left)
    }

    /// The ticks with a number: 1, and as many as there is room for.
    fn labelled(&self) -> impl Iterator<Item = &f64> {
        let apart = (PLOT_RIGHT - self.left) / (self.ticks.len() - 1) as f64;
        let every = (LABEL_ROOM / apart).ceil().max(1.0) as usize;
        let one = self.ticks.iter().position(|tick| (tick - 1.0).abs() < 1e-9).unwrap_or(0);
        self.ticks
            .iter()
            .enumerate()
            .filter(move |(at, _)| at.abs_diff(one).is_multiple_of(every))
            .map(|(_, tick)| tick)
    }
}

/// Room for the names of the two columns.
const HEAD: f64 = 20.0;
const ROW: f64 = 20.0;
const DOT: f64 = 4.5;
const PLOT_RIGHT: f64 = 228.0;
/// Ends of the two columns of numbers.
const MEASURED_END: f64 = 276.0;
const PUBLISHED_END: f64 = 356.0;
const LABEL_CHARS: usize = 20;
/// Largest average width of a character of a label.
const CHAR: f64 = 6.8;
const HEADING_CHARS: usize = 48;
/// Width of a number at the axis.
const LABEL_ROOM: f64 = 34.0;

#[cfg(test)]
mod tests {
    use super::*;

    fn axis(ratios: &[f64]) -> Vec<f64> {
        Axis::over(ratios.iter().copied(), 100.0).unwrap().ticks
    }

    #[test]
    fn half_and_double_are_equally_far_from_one() {
        let axis = Axis::over([0.5, 2.0].into_iter(), 100.0).unwrap();
        assert!((axis.x(1.0) - axis.x(0.5) - (axis.x(2.0) - axis.x(1.0))).abs() < 1e-9);
    }

    #[test]
    fn the_axis_reaches_over_every_ratio_and_has_one_among_its_ticks() {
        assert_eq!(axis(&[1.0]), [0.5, 1.0, 2.0]);
        assert_eq!(axis(&[0.64, 3.1]), [0.5, 1.0, 2.0, 4.0]);
        assert_eq!(axis(&[0.02, 900.0]), [0.01, 0.1, 1.0, 10.0, 100.0, 1000.0]);
        assert!(Axis::over([f64::NAN, 0.0].into_iter(), 100.0).is_none());
    }

    #[test]
    fn a_row_has_a_dot_for_each_value_that_it_has() {
        let value = |ratio| Some(Value { ratio, shown: "7 IOPS".to_owned() });
        let row = |measured, published| Ratio { label: "row".to_owned(), class: "iser", measured, published };
        let rows = vec![row(value(0.9), None), row(None, value(3.0)), row(value(1.0), value(1.0))];
        let drawn = Ratios { title: "t".to_owned(), groups: vec![("iser".to_owned(), rows)] }.draw();
        assert_eq!(drawn.matches(r#"<circle class="here" "#).count(), 2, "{drawn}");
        assert_eq!(drawn.matches(r#"<circle class="there" "#).count(), 2, "{drawn}");
        assert!(drawn.contains("row: measured here 0.90× (7 IOPS)"), "{drawn}");
    }
}
