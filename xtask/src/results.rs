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
        for (figures, title) in TABLES {
            if let Some(table) = table(&own, figures)? {
                let _ = write!(out, "\n\n{title}:\n\n{table}");
            }
        }
    }
    out.truncate(out.trim_end().len());
    out.push('\n');
    Ok(out)
}

/// A line for each job and a column for each server; `None` if no server has one of the figures.
/// The table of IOPS also has our ratios.
fn table(cells: &[&Value], figures: &[&str]) -> Result<Option<String>> {
    let is_of_iops = figures.contains(&"iops");
    let has = |row: &Value| figures.iter().any(|figure| !row[*figure].is_null());
    let mut servers: Vec<&str> = Vec::new();
    let mut ratios: Vec<(&str, &str)> = Vec::new();
    for cell in cells {
        for row in list(cell, "rows")? {
            let server = text_of(row, "server")?;
            if has(row) && (is_of_iops || !is_in_data_only(server)) && !servers.contains(&server) {
                servers.push(server);
            }
            let own = RATIOS.iter().filter(|(key, _)| server == OURS && !row[*key].is_null());
            ratios.extend(own.filter(|_| is_of_iops));
        }
    }
    if servers.is_empty() {
        return Ok(None);
    }
    ratios.sort_unstable();
    ratios.dedup();
    let columns: Vec<&str> = servers.iter().copied().chain(ratios.iter().map(|(_, title)| *title)).collect();
    let mut out = format!("| job | {} |\n|---|{}\n", columns.join(" | "), "---:|".repeat(columns.len()));
    for cell in cells {
        let _ = write!(out, "| {} |", in_fios_words(text_of(cell, "job")?));
        let rows = list(cell, "rows")?;
        let row_of = |server: &str| rows.iter().find(|row| row["server"] == server);
        for server in &servers {
            let shown = row_of(server).map(|row| figures.iter().map(|figure| shown(row, figure)));
            let shown: Vec<String> = shown.into_iter().flatten().flatten().collect();
            let _ = write!(out, " {} |", shown.join(", "));
        }
        for (key, _) in &ratios {
            let ratio = row_of(OURS).and_then(|row| row[*key].as_f64());
            let _ = write!(out, " {} |", ratio.map(|ratio| format!("{ratio:.2}")).unwrap_or_default());
        }
        out.push('\n');
    }
    Ok(Some(out.trim_end().to_owned()))
}

/// Whether a page leaves the latency and the CPU time of a server to the data: those of ceilings,
/// and of our variants that differ in more than polling.
fn is_in_data_only(server: &str) -> bool {
    server.starts_with("ceiling")
        || server.strip_prefix(OURS).is_some_and(|variant| !["", "-always", "-never"].contains(&variant))
}

/// A job such as "4 KiB random read, depth 32 x 4" as the narrow `4k randread 32x4`.
fn in_fios_words(job: &str) -> String {
    const WORDS: [(&str, &str); 6] = [
        (" KiB", "k"),
        (" MiB", "m"),
        ("random ", "rand"),
        ("sequential ", ""),
        (", depth ", " "),
        (" x ", "x"),
    ];
    WORDS.iter().fold(job.to_owned(), |job, (long, short)| job.replace(long, short))
}

/// A figure with three digits, the IOPS with their spread if it is large.
fn shown(row: &Value, figure: &str) -> Option<String> {
    let value = row[figure].as_f64()? / if figure == "iops" { 1000.0 } else { 1.0 };
    let digits = match value {
        value if value >= 100.0 => 0,
        value if value >= 10.0 => 1,
        _ => 2,
    };
    let spread = row["spread_percent"].as_f64().filter(|spread| figure == "iops" && *spread > LARGE_SPREAD);
    Some(format!("{value:.digits$}{}", spread.map(|spread| format!(" ±{spread}%")).unwrap_or_default()))
}

fn text_of<'a>(value: &'a Value, key: &str) -> Result<&'a str> {
    value[key].as_str().with_context(|| format!("`{key}` is not a string"))
}

fn list<'a>(value: &'a Value, key: &str) -> Result<&'a Vec<Value>> {
    value[key].as_array().with_context(|| format!("`{key}` is not a list"))
}

/// The tables of a client: the keys of their figures in a data file, and a title.
const TABLES: [(&[&str], &str); 2] = [
    (&["iops"], "Thousands of IOPS, and half the range of the runs where it is above 10%"),
    (
        &["p99_us", "server_cpu_us"],
        "99th percentile of latency if the client states it, and CPU time of the server for each I/O, in µs",
    ),
];

/// Ratios of the IOPS of `OURS`: their keys in a data file, and the titles of their columns.
const RATIOS: [(&str, &str); 2] =
    [("of_best_peer", "blockmux / best other"), ("of_ceiling", "blockmux / ceiling")];
const OURS: &str = "blockmux";

/// The spread in percent above which small differences mean nothing.
const LARGE_SPREAD: f64 = 10.0;

pub(crate) const DATA: &str = "docs/results/data";
pub(crate) const PAGES: &str = "docs/results";

const GENERATED: &str = "<!-- Made by `cargo xtask results` from docs/results/data; edit the data. -->";
const INDEX: &str = "\
# Results

<!-- Made by `cargo xtask results` from docs/results/data; edit the data. -->

Comparisons with other implementations. [Method](../benchmarking/method.md) says how they are measured, and
[Results](../benchmarking/results.md) what stands out. A job is the
block size, fio's pattern, the depth, and `xN` for several connections. The [data](data/) also has latency and CPU time of the ceilings and of all variants.

| comparison | machine | date |
|---|---|---|
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_the_figures_of_each_client_and_the_index_has_each_page() {
        let rows = r#"[{"server": "blockmux", "iops": 106804, "spread_percent": 16, "p99_us": 22.4, "server_cpu_us": 8.65,
            "of_ceiling": 0.884}, {"server": "b", "iops": 950, "spread_percent": 9, "server_cpu_us": 119},
            {"server": "blockmux-crc", "iops": 9500, "server_cpu_us": 9}]"#;
        let data = format!(
            r#"{{"title": "T", "machine": "M", "date": "2026-11-22", "command": "c", "method": "Medians.", "notes": ["n"],
            "cells": [{{"job": "4 KiB random read, depth 32 x 4", "client": "fio", "rows": {rows}}}]}}"#
        );
        let pages = pages(&BTreeMap::from([(format!("{DATA}/t.json"), data)])).unwrap();
        let page = &pages["docs/results/t.md"];
        let iops = "| job | blockmux | b | blockmux-crc | blockmux / ceiling |\n|---|---:|---:|---:|---:|\n\
                    | 4k randread 32x4 | 107 ±16% | 0.95 | 9.50 | 0.88 |";
        assert!(page.contains(iops), "{page}");
        assert!(
            page.contains("| job | blockmux | b |\n|---|---:|---:|\n| 4k randread 32x4 | 22.4, 8.65 | 119 |"),
            "{page}"
        );
        assert!(pages["docs/results/README.md"].contains("| [T](t.md) | M | 2026-11-22 |"));
        let broken = BTreeMap::from([(format!("{DATA}/t.json"), "{}".to_owned())]);
        assert!(super::pages(&broken).unwrap_err().to_string().contains("t.json"));
    }
}
