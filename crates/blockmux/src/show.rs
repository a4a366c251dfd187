//! What was measured, shown: a table or JSON on standard output, and a report of two files.

use crate::failure::Failure;
use crate::output;
use blockmux_lab::result::Comparison;
use blockmux_lab::suite::{Study, Suite};
use blockmux_lab::{fio_json, page, table};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

/// Makes the report's directory. Whether it can be made is found out before minutes of measuring
/// and not after.
///
/// # Errors
/// If it cannot be made.
pub(crate) fn make_directory(report: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(report).map_err(|error| {
        let dir = report.display();
        Failure::request(format!("--report {dir}: cannot make this directory: {error}; name another one"))
    })
}

/// Writes the report into that directory, if there shall be one, and prints the JSON, or the table
/// and where the report is.
///
/// # Errors
/// If one of them cannot be written.
pub(crate) fn show(comparison: &Comparison, report: Option<&Path>, as_json: bool) -> Result<(), Failure> {
    let json = fio_json::to_json(comparison);
    let study = study(comparison);
    let files = report.map(|dir| write_report(dir, comparison, study.as_ref(), &json)).transpose();
    // What was measured for minutes is shown even if there is no room for it.
    if as_json {
        output::print(json)?;
    } else {
        output::print(table::render(comparison, study.as_ref(), width(), colour()))?;
    }
    match files? {
        Some((json, page)) if !as_json => {
            output::print(format_args!("{}\n{}", json.display(), page.display()))
        }
        _ => Ok(()),
    }
}

/// The study that a comparison repeats.
fn study(comparison: &Comparison) -> Option<Study> {
    // A report of a later version may have another suite.
    let suite = Suite::by_name(comparison.suite.as_deref()?).ok()?;
    Some(suite.to_study())
}

/// Writes both files; answers where.
fn write_report(
    dir: &Path,
    comparison: &Comparison,
    study: Option<&Study>,
    json: &str,
) -> Result<(PathBuf, PathBuf), Failure> {
    let page = page::render(comparison, study).map_err(Failure::run)?;
    let write = |name: &str, text: &str| {
        let path = dir.join(name);
        std::fs::write(&path, text)
            .map_err(|error| Failure::run(format!("{}: cannot write the report: {error}", path.display())))?;
        Ok::<_, Failure>(path)
    };
    Ok((write("bench.json", json)?, write("bench.html", &page)?))
}

/// The terminal's columns, 80 where there is none.
fn width() -> table::Width {
    let columns = console_columns().filter(|&columns| columns >= 40).unwrap_or(80);
    table::Width(columns.min(120))
}

/// Colours for people only.
fn colour() -> table::Colour {
    let wanted = std::io::stdout().is_terminal() && output::may_colour();
    if wanted { table::Colour::Ansi } else { table::Colour::Off }
}

fn console_columns() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok()?;
    Some(size.ws_col.into())
}
