//! The pages of `docs/results/`, made from the measurements in `docs/results/data/`.
//!
//! A data file has one comparison: machine, date and method, and the result of each server for each
//! job and client. `cargo xtask results` writes the pages; tidy checks that they are up to date.

use anyhow::{Context, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

/// Writes the pages; returns their number.
///
/// # Errors
/// If a data file is malformed, or something cannot be read or written.
pub(crate) fn write(root: &Path) -> Result<usize> {
    let mut data = BTreeMap::new();
    for entry in fs::read_dir(root.join(DATA))? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).context("a file name is not UTF-8")?;
        data.insert(format!("{DATA}/{name}"), fs::read_to_string(&path)?);
    }
    let pages = pages(&data)?;
    for (path, text) in &pages {
        fs::write(root.join(path), text)?;
    }
    Ok(pages.len())
}

/// Generates the pages of these data files. Keys are paths.
///
/// # Errors
/// If a data file is malformed.
pub(crate) fn pages(data: &BTreeMap<String, String>) -> Result<BTreeMap<String, String>> {
    let mut pages = BTreeMap::new();
    let mut index = String::from(INDEX);
    for (path, text) in data {
        let name = path.strip_prefix(DATA).and_then(|name| name.strip_suffix(".json"));
        let name = name.with_context(|| format!("{path} is not a .json file"))?.trim_start_matches('/');
        let results: Value = serde_json::from_str(text).with_context(|| path.clone())?;
        let page = page(&results).with_context(|| path.clone())?;
        let (title, date) = (text_of(&results, "title")?, text_of(&results, "date")?);
        let _ = writeln!(index, "| [{title}]({name}.md) | {} | {date} |", text_of(&results, "machine")?);
        pages.insert(format!("{PAGES}/{name}.md"), page);
    }
    pages.insert(format!("{PAGES}/README.md"), index);
    Ok(pages)
}

fn page(results: &Value) -> Result<String> {
    let mut out = format!("# {}\n\n{GENERATED}\n\n", text_of(results, "title")?);
    let (machine, date) = (text_of(results, "machine")?, text_of(results, "date")?);
    let _ = writeln!(out, "{machine}, {date}. {}\n", text_of(results, "method")?);
    let _ = writeln!(out, "```\n{}\n```", text_of(results, "command")?);
    for note in list(results, "notes")? {
        let _ = write!(out, "\n- {}", note.as_str().context("a note is not a string")?);
    }
    let cells = list(results, "cells")?;
    let mut clients: Vec<&str> = Vec::new();
    for cell in cells {
        let client = text_of(cell, "client")?;
        if !clients.contains(&client) {
            clients.push(client);
        }
    }
    for client in clients {
        let own: Vec<&Value> = cells.iter().filter(|cell| cell["client"] == client).collect();
        let _ = write!(out, "\n\n## Client {client}");
        for (figure, title, _) in FIGURES {
            if let Some(table) = table(&own, figure)? {
                let _ = write!(out, "\n\n{title}:\n\n{table}");
            }
        }
    }
    out.truncate(out.trim_end().len());
    out.push('\n');
    Ok(out)
}

/// A line for each job and a column for each server; `None` if no server has that figure.
fn table(cells: &[&Value], figure: &str) -> Result<Option<String>> {
    let mut servers: Vec<&str> = Vec::new();
    for cell in cells {
        for row in list(cell, "rows")?.iter().filter(|row| !row[figure].is_null()) {
            let server = text_of(row, "server")?;
            if !servers.contains(&server) {
                servers.push(server);
            }
        }
    }
    if servers.is_empty() {
        return Ok(None);
    }
    let mut out = format!("| | {} |\n|---|{}\n", servers.join(" | "), "---:|".repeat(servers.len()));
    for cell in cells {
        let _ = write!(out, "| {} |", text_of(cell, "job")?);
        let rows = list(cell, "rows")?;
        for server in &servers {
            let row = rows.iter().find(|row| row["server"] == *server);
            let _ = write!(out, " {} |", row.and_then(|row| shown(row, figure)).unwrap_or_default());
        }
        out.push('\n');
    }
    Ok(Some(out.trim_end().to_owned()))
}

fn shown(row: &Value, figure: &str) -> Option<String> {
    let value = row[figure].as_f64()?;
    let (_, _, per) = FIGURES.iter().find(|(name, ..)| *name == figure)?;
    let value = value / per;
    let digits = match value {
        _ if figure.starts_with("of_") => 2,
        value if value >= 100.0 => 0,
        value if value >= 10.0 => 1,
        _ => 2,
    };
    let spread = row["spread_percent"].as_f64().filter(|_| figure == "iops");
    Some(format!("{value:.digits$}{}", spread.map(|spread| format!(" ±{spread}%")).unwrap_or_default()))
}

fn text_of<'a>(value: &'a Value, key: &str) -> Result<&'a str> {
    value[key].as_str().with_context(|| format!("`{key}` is not a string"))
}

fn list<'a>(value: &'a Value, key: &str) -> Result<&'a Vec<Value>> {
    value[key].as_array().with_context(|| format!("`{key}` is not a list"))
}

/// Each figure: its key in a data file, its title, and the divisor of its values.
const FIGURES: [(&str, &str, f64); 5] = [
    ("iops", "Thousands of IOPS, and half the range of the runs", 1000.0),
    ("of_best_peer", "IOPS, as a multiple of the best other server's", 1.0),
    ("of_ceiling", "IOPS, as a share of bare sockets with the same message sizes and polling", 1.0),
    ("p99_us", "99th percentile of latency in µs", 1.0),
    ("server_cpu_us", "CPU time of the server for each I/O in µs", 1.0),
];

pub(crate) const DATA: &str = "docs/results/data";
pub(crate) const PAGES: &str = "docs/results";

const GENERATED: &str = "<!-- Made by `cargo xtask results` from docs/results/data; edit the data. -->";
const INDEX: &str = "\
# Results

<!-- Made by `cargo xtask results` from docs/results/data; edit the data. -->

Comparisons with other implementations. [Method](../benchmarking/method.md) says how they are measured, and
[Results](../benchmarking/results.md) what stands out.

| comparison | machine | date |
|---|---|---|
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_a_table_for_each_figure_and_the_index_has_each_page() {
        let rows = r#"[{"server": "a", "iops": 106804, "spread_percent": 16, "of_ceiling": 0.884}, {"server": "b", "iops": 950}]"#;
        let data = format!(
            r#"{{"title": "T", "machine": "M", "date": "2026-11-22", "command": "c", "method": "Medians.", "notes": ["n"],
            "cells": [{{"job": "4 KiB read", "client": "fio", "rows": {rows}}}]}}"#
        );
        let pages = pages(&BTreeMap::from([(format!("{DATA}/t.json"), data)])).unwrap();
        let page = &pages["docs/results/t.md"];
        assert!(page.contains("| | a | b |\n|---|---:|---:|\n| 4 KiB read | 107 ±16% | 0.95 |"), "{page}");
        assert!(page.contains("| | a |\n|---|---:|\n| 4 KiB read | 0.88 |"), "{page}");
        assert!(pages["docs/results/README.md"].contains("| [T](t.md) | M | 2026-11-22 |"));
        let broken = BTreeMap::from([(format!("{DATA}/t.json"), "{}".to_owned())]);
        assert!(super::pages(&broken).unwrap_err().to_string().contains("t.json"));
    }
}
