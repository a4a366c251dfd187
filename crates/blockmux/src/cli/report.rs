//! `blockmux report`: shows or compares finished measurements.

use crate::cli::show;
use crate::failure::Failure;
use blockmux_lab::fio_json;
use blockmux_volume::units::human_size;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Arguments of `blockmux report`: files with the JSON of `blockmux bench` or fio.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ReportArgs {
    /// bench.json of one or more runs, or fio --output-format=json
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Write bench.json and bench.html of all files to this directory
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
    /// Print JSON instead of the table
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(args: &ReportArgs) -> Result<(), Failure> {
    let mut comparisons = Vec::new();
    for path in &args.files {
        let name = path.display();
        let text = read(path).map_err(|error| {
            Failure::request(format!("{name}: cannot read it: {error}; {ACCEPTED_FILES}"))
        })?;
        let comparison = fio_json::from_json(&text)
            .map_err(|error| Failure::request(format!("{name}: {error}; {ACCEPTED_FILES}")))?;
        comparisons.push((label(path), comparison));
    }
    let Some(merged) = fio_json::merge(comparisons) else {
        return Err(Failure::request("no file given; give a bench.json"));
    };
    if let Some(dir) = &args.report {
        show::make_directory(dir)?;
    }
    show::show(&merged, args.report.as_deref(), args.json)
}

/// Reads a file, which may be a pipe, up to [`MAX_LEN`].
fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    let len = File::open(path)?.take(MAX_LEN + 1).read_to_string(&mut text)? as u64;
    if len > MAX_LEN {
        return Err(io::Error::other(format!("is longer than {}", human_size(MAX_LEN))));
    }
    Ok(text)
}

/// The label of a file's rows: its directory, because every bench gives its file the same name.
fn label(path: &Path) -> String {
    let directory =
        path.parent().filter(|parent| path.ends_with("bench.json") && parent.file_name().is_some());
    directory.unwrap_or(path).display().to_string()
}

/// The maximum length of a file, in bytes; far more than thousands of measurements.
const MAX_LEN: u64 = 64 << 20;
const ACCEPTED_FILES: &str = "give a bench.json, or the output of fio --output-format=json";
const EXAMPLES: &str = "\
Examples:
  blockmux report bench-results/bench.json
  blockmux report monday/bench.json tuesday/bench.json --report both

Cases that are in several files are shown with the directory of their file.";
