//! Bar and line charts as inline SVG. Colours and dashes are classes, which the style sheet
//! defines.

use super::svg::{self, escaped, framed, line, linear_ticks, log_ticks, n, text};
use crate::figure::{self, shortened};
use crate::result::NOISY_SHARE;
use std::fmt::Write as _;

/// Horizontal bars on one axis, in groups with headings.
pub(super) struct Bars {
    pub(super) title: String,
    pub(super) groups: Vec<BarGroup>,
    /// Formats the value next to its bar.
    pub(super) shown: fn(f64) -> String,
}

/// Bars under one heading; an empty heading takes no space.
pub(super) struct BarGroup {
    pub(super) heading: String,
    pub(super) bars: Vec<Bar>,
}

/// One bar, with its parts end to end.
#[derive(Default)]
pub(super) struct Bar {
    pub(super) label: String,
    /// (length, class).
    pub(super) parts: Vec<(f64, String)>,
    /// The value of each run: a dot each, and a whisker from the smallest to the largest.
    pub(super) runs: Vec<f64>,
    /// Whether the bar may be truncated at the axis if it would dwarf every other bar.
    pub(super) may_break: bool,
    /// The ceiling's value: a tick across the bar.
    pub(super) ceiling: Option<f64>,
    /// The bar's share of its ceiling, as a fraction, shown after its value.
    pub(super) share: Option<f64>,
    /// The text shown in place of the value.
    pub(super) text: Option<String>,
}

impl Bar {
    fn value(&self) -> f64 {
        self.parts.iter().map(|part| part.0).sum()
    }

    fn most(&self) -> f64 {
        self.runs.iter().copied().fold(self.value(), f64::max)
    }

    /// Whether the value is so far above its ceiling that the share is meaningless: the bar is then
    /// hatched.
    pub(super) fn is_hatched(&self) -> bool {
        self.share.is_some_and(|share| share > NOISY_SHARE)
    }
}

impl Bars {
    /// The chart; empty if there is no bar.
    pub(super) fn draw(&self) -> String {
        let bars = || self.groups.iter().flat_map(|group| &group.bars);
        if bars().next().is_none() {
            return String::new();
        }
        let largest = |may_break: bool| {
            let some = bars().filter(|bar| bar.may_break == may_break);
            some.map(|bar| bar.most().max(bar.ceiling.unwrap_or(0.0))).fold(0.0, f64::max)
        };
        let (whole, breakable) = (largest(false), largest(true));
        // Bars are compared by length, so a bar is truncated only if the others would be too short
        // to distinguish.
        let most = if whole > 0.0 && breakable > whole * BREAK_FROM { whole } else { whole.max(breakable) };
        let ticks = linear_ticks(most);
        let end = ticks[ticks.len() - 1];
        let left = self.left();
        let right = self.right();
        let x = |value: f64| left + value / end * (right - left);
        let (body, bottom) = self.body(end, x);
        let mut out = String::new();
        let every = labelled_ticks(&ticks, x(ticks[1]) - left);
        for (nth, &tick) in ticks.iter().enumerate() {
            line(&mut out, "grid", (x(tick), TOP), (x(tick), bottom));
            if nth.is_multiple_of(every) {
                text(&mut out, "tick mid", x(tick), bottom + 14.0, &svg::tick(tick));
            }
        }
        out.push_str(&body);
        framed(bottom + 20.0, &self.title, &self.description(), &out)
    }

    /// The start of the bars: after the longest label, and aligned between charts with labels of
    /// usual length.
    fn left(&self) -> f64 {
        let labels = self.groups.iter().flat_map(|group| &group.bars).map(|bar| bar.label.chars().count());
        let longest = labels.max().unwrap_or(0).clamp(LABEL_CHARS, MAX_LABEL_CHARS);
        LEFT + (longest - LABEL_CHARS) as f64 * CHAR
    }

    /// The end of the axis, which leaves room for the longest value after it.
    fn right(&self) -> f64 {
        let room = |bar: &Bar| {
            let share = bar.share.map_or(0, |share| figure::percent(share).chars().count() + 1);
            (self.text(bar).chars().count() + share) as f64 * DIGIT
        };
        let longest = self.groups.iter().flat_map(|group| &group.bars).map(room).fold(0.0, f64::max);
        (svg::WIDTH - 10.0 - longest).min(RIGHT)
    }

    /// The text next to a bar.
    fn text(&self, bar: &Bar) -> String {
        bar.text.clone().unwrap_or_else(|| (self.shown)(bar.value()))
    }

    fn body(&self, end: f64, x: impl Fn(f64) -> f64) -> (String, f64) {
        let mut out = String::new();
        let mut y = TOP;
        for group in &self.groups {
            if !group.heading.is_empty() {
                text(&mut out, "heading", 0.0, y + 14.0, &shortened(&group.heading, HEADING_CHARS));
                y += 20.0;
            }
            for bar in &group.bars {
                self.bar(&mut out, bar, y, end, &x);
                y += ROW;
            }
            y += 6.0;
        }
        (out, y)
    }

    fn bar(&self, out: &mut String, bar: &Bar, y: f64, end: f64, x: &impl Fn(f64) -> f64) {
        let _ = write!(out, "<g><title>{}</title>", escaped(&self.hint(bar)));
        text(out, "label", x(0.0) - 6.0, y + 14.0, &shortened(&bar.label, MAX_LABEL_CHARS));
        // The bar or one of its runs exceeds the axis.
        let broken = bar.most() > end;
        let mut from = 0.0;
        for (length, class) in &bar.parts {
            let to = (from + length).min(end);
            let (left, width) = (n(x(from)), n((x(to) - x(from)).max(0.5)));
            let _ = write!(
                out,
                r#"<rect class="bar {class}" x="{left}" y="{}" width="{width}" height="{BAR}" rx="1.5"/>"#,
                n(y + 3.0)
            );
            from = to;
        }
        if bar.value() <= end && bar.runs.len() > 1 {
            let middle = y + 3.0 + BAR / 2.0;
            let least = bar.runs.iter().copied().fold(f64::INFINITY, f64::min);
            // Drawn first as a halo, because bars are light or dark.
            for class in ["whisker under", "whisker"] {
                line(out, class, (x(least), middle), (x(bar.most().min(end)), middle));
            }
            for &run in bar.runs.iter().filter(|&&run| run <= end) {
                let _ = write!(out, r#"<circle class="run" cx="{}" cy="{}" r="1.7"/>"#, n(x(run)), n(middle));
            }
            from = bar.most().min(end);
        }
        if broken {
            // Two slanted cuts near the end.
            for cut in [x(end) - 16.0, x(end) - 11.0] {
                line(out, "cut", (cut - 3.0, y + BAR + 5.0), (cut + 3.0, y + 1.0));
            }
        }
        if bar.is_hatched() {
            hatch(out, (x(0.0), x(bar.value().min(end))), y + 3.0);
        }
        if let Some(ceiling) = bar.ceiling {
            for class in ["ceiling under", "ceiling"] {
                line(out, class, (x(ceiling), y + 0.5), (x(ceiling), y + BAR + 5.5));
            }
            from = from.max(ceiling);
        }
        let shown = self.text(bar);
        let share = bar.share.map_or_else(String::new, |share| {
            format!(r#"<tspan class="share" dx="6">{}</tspan>"#, figure::percent(share))
        });
        let (x, y, shown) = (n(x(from) + 6.0), n(y + 14.0), escaped(&shown));
        let _ = write!(out, r#"<text class="value" x="{x}" y="{y}">{shown}{share}</text>"#);
        out.push_str("</g>");
    }

    fn hint(&self, bar: &Bar) -> String {
        let runs: Vec<String> = bar.runs.iter().map(|&run| (self.shown)(run)).collect();
        let runs = if runs.len() > 1 { format!("; runs: {}", runs.join(", ")) } else { String::new() };
        let shown = self.text(bar);
        format!("{}: {shown}{}{runs}", bar.label, self.ceiling_in_words(bar))
    }

    fn ceiling_in_words(&self, bar: &Bar) -> String {
        let share = bar.share.map_or_else(String::new, |share| format!("{} of ", figure::percent(share)));
        let ceiling = bar.ceiling.map(|ceiling| format!(", {share}its ceiling {}", (self.shown)(ceiling)));
        ceiling.unwrap_or_default()
    }

    fn description(&self) -> String {
        let group = |group: &BarGroup| {
            let bars = group.bars.iter().map(|bar| {
                let shown = self.text(bar);
                format!("{} {shown}{}", bar.label, self.ceiling_in_words(bar))
            });
            let bars: Vec<String> = bars.collect();
            let heading =
                if group.heading.is_empty() { String::new() } else { format!("{}: ", group.heading) };
            format!("{heading}{}", bars.join(", "))
        };
        self.groups.iter().map(group).collect::<Vec<_>>().join("; ")
    }
}

/// The interval of ticks with a number, so that numbers do not overlap.
fn labelled_ticks(ticks: &[f64], apart: f64) -> usize {
    interval(ticks.iter().map(|&tick| svg::tick(tick)), apart)
}

/// Every how many texts there is room for one, if they are this far apart.
fn interval(texts: impl Iterator<Item = String>, apart: f64) -> usize {
    let longest = texts.map(|text| text.chars().count()).max().unwrap_or(0);
    // Leaves room for a character between two numbers.
    ((longest + 1) as f64 * TICK_CHAR / apart).ceil().max(1.0) as usize
}

/// Diagonals over a bar, clipped to it. A fill pattern would need a URL, and the page contains
/// none.
fn hatch(out: &mut String, (left, right): (f64, f64), top: f64) {
    let mut path = String::new();
    let mut foot = left - BAR + HATCH;
    while foot < right {
        // It rises to the right at 45 degrees from the bar's lower edge.
        let (from, to) = (foot.max(left), (foot + BAR).min(right));
        let y = |x: f64| top + BAR - (x - foot);
        let _ = write!(path, "M{} {}L{} {}", n(from), n(y(from)), n(to), n(y(to)));
        foot += HATCH;
    }
    let _ = write!(out, r#"<path class="hatch" d="{path}"/>"#);
}

/// Lines over queue depth or block size, both axes logarithmic, in panels above each other that
/// share the horizontal axis.
pub(super) struct Lines {
    pub(super) title: String,
    pub(super) axis: LineAxis,
    pub(super) panels: Vec<Panel>,
}

/// The horizontal axis.
pub(super) struct LineAxis {
    /// What its numbers are: "depth".
    pub(super) name: &'static str,
    /// Its numbers, ascending and above 0.
    pub(super) places: Vec<u32>,
    /// Formats a number.
    pub(super) shown: fn(u32) -> String,
}

/// Lines with one vertical axis.
pub(super) struct Panel {
    pub(super) heading: String,
    /// The unit of its values.
    pub(super) unit: &'static str,
    pub(super) lines: Vec<ChartLine>,
}

/// One line.
pub(super) struct ChartLine {
    pub(super) label: String,
    pub(super) class: String,
    pub(super) points: Vec<Point>,
}

/// One point: a median, and the extremes around it.
pub(super) struct Point {
    /// The place on the horizontal axis.
    pub(super) at: u32,
    pub(super) median: f64,
    pub(super) min: f64,
    pub(super) max: f64,
}

impl Lines {
    /// The chart; empty if the axis has fewer than two numbers, or if there is no point above 0.
    pub(super) fn draw(&self) -> String {
        let (Some(&first), Some(&last)) = (self.axis.places.first(), self.axis.places.last()) else {
            return String::new();
        };
        if first == last {
            return String::new();
        }
        let right = self.right();
        let x = |at: u32| {
            let along = (f64::from(at) / f64::from(first)).ln() / (f64::from(last) / f64::from(first)).ln();
            PLOT_LEFT + along * (right - PLOT_LEFT)
        };
        let mut out = String::new();
        let mut top = TOP;
        for panel in &self.panels {
            text(&mut out, "heading", 0.0, top + 14.0, &panel.heading);
            if !panel.draw(&mut out, (right, top + 26.0), &self.axis, &x) {
                return String::new();
            }
            top += 26.0 + PANEL + 12.0;
        }
        let bottom = top - 12.0;
        let apart = (right - PLOT_LEFT) / (self.axis.places.len() - 1) as f64;
        let every = self.axis.labelled(apart);
        for &at in self.axis.places.iter().step_by(every) {
            text(&mut out, "tick mid", x(at), bottom + 14.0, &(self.axis.shown)(at));
        }
        text(&mut out, "tick mid", f64::midpoint(PLOT_LEFT, right), bottom + 29.0, self.axis.name);
        framed(bottom + 34.0, &self.title, &self.description(), &out)
    }

    /// The end of the horizontal axis, which leaves room for the longest name after it.
    fn right(&self) -> f64 {
        let lines = self.panels.iter().flat_map(|panel| &panel.lines);
        let names = lines.map(|line| line.label.chars().count());
        let longest = names.max().unwrap_or(0).clamp(LABEL_CHARS, MAX_END_CHARS);
        PLOT_RIGHT - (longest - LABEL_CHARS) as f64 * CHAR
    }

    fn description(&self) -> String {
        let line = |line: &ChartLine| {
            let points = line.points.iter();
            let points = points.map(|point| {
                format!("{} at {}", figure::measure(point.median), self.axis.place_in_words(point.at))
            });
            format!("{} {}", line.label, points.collect::<Vec<_>>().join(", "))
        };
        let panel = |panel: &Panel| {
            let lines = panel.lines.iter().map(line);
            format!("{}: {}", panel.heading, lines.collect::<Vec<_>>().join("; "))
        };
        self.panels.iter().map(panel).collect::<Vec<_>>().join(". ")
    }
}

impl LineAxis {
    fn place_in_words(&self, at: u32) -> String {
        format!("{} {}", self.name, (self.shown)(at))
    }

    /// The interval of numbers that are written, so that they do not overlap.
    fn labelled(&self, apart: f64) -> usize {
        interval(self.places.iter().map(|&at| (self.shown)(at)), apart)
    }
}

impl Panel {
    /// Draws the panel; returns whether there was anything to draw.
    fn draw(
        &self,
        out: &mut String,
        (right, top): (f64, f64),
        axis: &LineAxis,
        x: &impl Fn(u32) -> f64,
    ) -> bool {
        let points = || self.lines.iter().flat_map(|line| &line.points).filter(|point| point.min > 0.0);
        let least = points().map(|point| point.min).fold(f64::INFINITY, f64::min);
        let most = points().map(|point| point.max).fold(0.0, f64::max);
        if !(least.is_finite() && most > 0.0) {
            return false;
        }
        let ticks = log_ticks(least, most);
        let (low, high) = (ticks[0], ticks[ticks.len() - 1].max(ticks[0] * 2.0));
        let y = |value: f64| top + PANEL - (value / low).ln() / (high / low).ln() * PANEL;
        for &tick in &ticks {
            line(out, "grid", (PLOT_LEFT, y(tick)), (right, y(tick)));
            text(out, "tick end", PLOT_LEFT - 6.0, y(tick) + 4.0, &svg::tick(tick));
        }
        for &at in &axis.places {
            line(out, "grid", (x(at), top), (x(at), top + PANEL));
        }
        let mut ends = Vec::new();
        for series in &self.lines {
            let points: Vec<&Point> = series.points.iter().filter(|point| point.min > 0.0).collect();
            let Some(last) = points.last() else { continue };
            self.curve(out, series, &points, (axis, x, &y));
            ends.push((y(last.median), x(last.at), series));
        }
        end_labels(out, ends, (right, top));
        true
    }

    fn curve(
        &self,
        out: &mut String,
        series: &ChartLine,
        points: &[&Point],
        (axis, x, y): (&LineAxis, &impl Fn(u32) -> f64, &impl Fn(f64) -> f64),
    ) {
        let path: Vec<String> =
            points.iter().map(|point| format!("{},{}", n(x(point.at)), n(y(point.median)))).collect();
        let class = &series.class;
        let _ = write!(out, r#"<polyline class="curve {class}" points="{}"/>"#, path.join(" "));
        for point in points {
            let at = x(point.at);
            line(out, &format!("curve range {class}"), (at, y(point.min)), (at, y(point.max)));
            let (place, value) = (axis.place_in_words(point.at), figure::measure(point.median));
            let hint = format!("{}, {place}: {value} {}", series.label, self.unit);
            let (cx, cy) = (n(at), n(y(point.median)));
            let _ = write!(
                out,
                r#"<circle class="point {class}" cx="{cx}" cy="{cy}" r="2.8"><title>{}</title></circle>"#,
                escaped(&hint)
            );
        }
    }
}

/// Draws each line's name at its end. Names that would overlap are moved apart and connected to
/// their lines.
fn end_labels(out: &mut String, mut ends: Vec<(f64, f64, &ChartLine)>, (right, top): (f64, f64)) {
    ends.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut places: Vec<f64> = ends.iter().map(|end| end.0).collect();
    for at in 1..places.len() {
        places[at] = places[at].max(places[at - 1] + LABEL_GAP);
    }
    // Names below the panel are moved up, and push those above them.
    let mut limit = (top + PANEL + 4.0).max(top + LABEL_GAP * places.len() as f64 - LABEL_GAP);
    for place in places.iter_mut().rev() {
        *place = place.min(limit);
        limit = *place - LABEL_GAP;
    }
    for ((from, end_x, series), place) in ends.into_iter().zip(places) {
        line(out, "tie", (end_x + 4.0, from), (right + 10.0, place));
        // A short piece of the line, because policies differ only in their dashes.
        let class = format!("curve {}", series.class);
        line(out, &class, (right + 10.0, place), (right + 27.0, place));
        let class = format!("end {}", series.class);
        text(out, &class, right + 31.0, place + 4.0, &shortened(&series.label, MAX_END_CHARS));
    }
}

/// A bar is truncated if it is this many times longer than all that may not be.
const BREAK_FROM: f64 = 1.6;
const TOP: f64 = 4.0;
const ROW: f64 = 23.0;
const BAR: f64 = 15.0;
/// Distance between two diagonals of a hatched bar.
const HATCH: f64 = 6.0;
/// Start of the bars, which leaves room for [`LABEL_CHARS`] before it.
const LEFT: f64 = 72.0;
/// End of the axis if values are short.
const RIGHT: f64 = 280.0;
const LABEL_CHARS: usize = 9;
const MAX_LABEL_CHARS: usize = 26;
/// Longest name after the end of a line: half of the chart is for the lines.
const MAX_END_CHARS: usize = 24;
/// Largest average width of a character of a label.
const CHAR: f64 = 7.0;
/// Width of a character of a number at the axis.
const TICK_CHAR: f64 = 6.5;
/// Width of a digit of a value, in bold.
const DIGIT: f64 = 7.6;
const HEADING_CHARS: usize = 48;
const PANEL: f64 = 150.0;
const PLOT_LEFT: f64 = 44.0;
/// End of the horizontal axis, which leaves room for [`LABEL_CHARS`] after it.
const PLOT_RIGHT: f64 = 264.0;
const LABEL_GAP: f64 = 14.5;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_that_dwarfs_all_others_is_truncated_at_the_axis() {
        let bar = |label: &str, runs: &[f64], may_break| Bar {
            label: label.to_owned(),
            parts: vec![(runs[0], "nbd".to_owned())],
            runs: runs.to_vec(),
            may_break,
            ..Bar::default()
        };
        let bars =
            vec![bar("local", &[400.0, 380.0, 9000.0], true), bar("nbd", &[350.0, 1900.0, 250.0], false)];
        let groups = vec![BarGroup { heading: String::new(), bars }];
        let drawn = Bars { title: "t".to_owned(), groups, shown: figure::count }.draw();
        let mut places: Vec<f64> = Vec::new();
        for name in [" x1=\"", " x2=\"", " cx=\""] {
            let values = drawn.split(name).skip(1).map(|rest| rest.split('"').next().unwrap());
            places.extend(values.map(|value| value.parse::<f64>().unwrap()));
        }
        assert!(places.len() > 10, "{drawn}");
        assert!(places.iter().all(|&place| (0.0..=RIGHT).contains(&place)), "{drawn}");
        assert_eq!(drawn.matches(r#"class="cut""#).count(), 2, "one of the two is broken");
        assert_eq!(drawn.matches(r#"class="run""#).count(), 5, "the run beyond the axis has no dot");
        assert!(drawn.contains("local: 400; runs: 400, 380, 9.00k"), "it can be read all the same: {drawn}");
    }

    #[test]
    fn a_label_after_its_line_is_whole_if_half_of_the_chart_remains() {
        for (name, shown) in [("nvme-tcp ceiling sleeps", "nvme-tcp ceiling sleeps"), ("nbd", "nbd")] {
            let point = |at| Point { at, median: 10.0, min: 9.0, max: 11.0 };
            let points = vec![point(1), point(32)];
            let line = ChartLine { label: name.to_owned(), class: "nbd".to_owned(), points };
            let panels = vec![Panel { heading: "mean".to_owned(), unit: "µs", lines: vec![line] }];
            let axis = LineAxis { name: "depth", places: vec![1, 32], shown: |depth| depth.to_string() };
            let drawn = Lines { title: "t".to_owned(), axis, panels }.draw();
            assert!(drawn.contains("depth 32: 10.0 µs</title>"), "{drawn}");
            assert!(drawn.contains(&format!(">{shown}</text>")), "{drawn}");
        }
    }

    /// The numbers at the axis of a chart with this bar.
    fn numbers(value: f64, label: &str) -> Vec<String> {
        let parts = vec![(value, "nbd".to_owned())];
        let bar = Bar { label: label.to_owned(), parts, ..Bar::default() };
        let groups = vec![BarGroup { heading: String::new(), bars: vec![bar] }];
        let drawn = Bars { title: "t".to_owned(), groups, shown: figure::count }.draw();
        let ticks = drawn.split(r#"class="tick mid""#).skip(1);
        ticks.map(|rest| rest.split(['>', '<']).nth(1).unwrap().to_owned()).collect()
    }

    #[test]
    fn numbers_at_the_axis_do_not_overlap() {
        assert_eq!(numbers(450.0, "nbd"), ["0", "100", "200", "300", "400", "500"]);
        assert_eq!(numbers(450e3, &"n".repeat(32)), ["0", "200k", "400k"]);
    }

    /// Draws a bar of `share` of a ceiling of 100.
    fn beside_its_ceiling(share: f64) -> String {
        let parts = vec![(share * 100.0, "nbd".to_owned())];
        let (ceiling, share) = (Some(100.0), Some(share));
        let bar = Bar { label: "nbd".to_owned(), parts, ceiling, share, ..Bar::default() };
        let groups = vec![BarGroup { heading: String::new(), bars: vec![bar] }];
        Bars { title: "t".to_owned(), groups, shown: figure::count }.draw()
    }

    #[test]
    fn a_ceiling_is_a_tick_on_its_bar_that_the_axis_reaches() {
        let drawn = beside_its_ceiling(0.4);
        let tick = drawn.split(r#"class="ceiling" x1=""#).nth(1).unwrap();
        // The axis reaches from 0 to 100, so the tick is at its end.
        let end = drawn.rsplit(r#"class="grid" x1=""#).next().unwrap();
        assert_eq!(tick.split('"').next(), end.split('"').next(), "{drawn}");
        assert!(drawn.contains(r#"class="share""#) && drawn.contains(">40%</tspan>"), "{drawn}");
        assert!(drawn.contains("nbd 40, 40% of its ceiling 100"), "a screen reader says it too: {drawn}");
    }

    #[test]
    fn only_bars_well_above_their_ceiling_are_hatched() {
        assert!(!beside_its_ceiling(1.09).contains("hatch"));
        let drawn = beside_its_ceiling(1.29);
        let path = drawn.split(r#"class="hatch" d=""#).nth(1).unwrap().split('"').next().unwrap();
        let places = path.split(['M', 'L']).skip(1).map(|at| at.split_once(' ').unwrap());
        let places: Vec<(f64, f64)> = places.map(|(x, y)| (x.parse().unwrap(), y.parse().unwrap())).collect();
        assert!(places.len() > 20);
        let bar = drawn.split(r#"<rect class="bar nbd" x=""#).nth(1).unwrap();
        let of = |name: &str| -> f64 {
            bar.split(name).nth(1).unwrap().split('"').next().unwrap().parse().unwrap()
        };
        let (right, top) = (LEFT + of("width=\""), of(" y=\""));
        let inside = |&(x, y): &(f64, f64)| {
            (LEFT - 0.1..=right + 0.1).contains(&x) && (top - 0.1..=top + BAR + 0.1).contains(&y)
        };
        assert!(places.iter().all(inside), "{drawn}");
    }
}
