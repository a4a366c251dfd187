//! `blockmux info`: describes a volume.

use crate::failure::Failure;
use crate::output::{both_sizes, printable};
use crate::process::stdout::{print, print_json};
use crate::protocol::reach;
use crate::volume_kinds::open::{self, Access, Use};
use blockmux_volume::{Spec, VolumeInfo};
use serde_json::{Value, json};
use std::fs::File;
use std::path::Path;

/// Arguments of `blockmux info`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct InfoArgs {
    /// A URL or any other volume
    #[arg(value_name = "URL")]
    volume: Spec,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Describes a volume.
pub(crate) fn run(args: &InfoArgs) -> Result<(), Failure> {
    match &args.volume {
        Spec::Url(url) => {
            let mut described = reach::of_url(url.as_written())?.describe()?;
            if !url.block_sizes().map_err(Failure::request)?.is_own() {
                let info = open::open(&args.volume, Use::briefly(Access::Read))?.volume.info();
                described.rows.push(("presented", blocks(&info)));
                described.json["presented"] = json!({
                    "size": info.size,
                    "logical_block": info.logical_block,
                    "physical_block": info.physical_block,
                });
            }
            if args.json {
                print_json(&with_common_keys(described.json, &args.volume, &described.info))
            } else {
                // In the form of `discover` and `serve`.
                let url = described.json["url"].as_str().map_or_else(|| url.to_string(), str::to_owned);
                print(table(&url, &described.rows))
            }
        }
        spec => {
            let opened = open::open(spec, Use::briefly(Access::Read))?;
            // The volume is opened read-only here, even if it is writable.
            let info = VolumeInfo { read_only: !is_writable(spec)?, ..opened.volume.info() };
            if args.json {
                print_json(&with_common_keys(json!({ "protocol": null }), spec, &info))
            } else {
                print(volume_text(spec, &info))
            }
        }
    }
}

fn volume_text(spec: &Spec, info: &VolumeInfo) -> String {
    let cache = match (info.volatile, info.write_cache) {
        (true, _) => "none; the content is lost when the process ends",
        (false, true) => "writes are stable after a flush",
        (false, false) => "none; completed writes are stable",
    };
    let rows = [
        ("size", both_sizes(info.size)),
        ("access", access(info.read_only).to_owned()),
        ("blocks", blocks(info)),
        ("cache", cache.to_owned()),
    ];
    table(&spec.to_string(), &rows)
}

fn blocks(info: &VolumeInfo) -> String {
    let VolumeInfo { logical_block, physical_block, preferred_block, .. } = info;
    format!("logical {logical_block}, physical {physical_block}, preferred {preferred_block}")
}

/// Adds the keys that every volume has, with what its protocol reports under other names, too.
fn with_common_keys(mut described: Value, volume: &Spec, info: &VolumeInfo) -> Value {
    let common = json!({
        "volume": volume.to_string(),
        "size": info.size,
        "read_only": info.read_only,
        "logical_block": info.logical_block,
        "physical_block": info.physical_block,
        "preferred_block": info.preferred_block,
        "write_cache": info.write_cache,
        "volatile": info.volatile,
    });
    let common = common.as_object().into_iter().flatten();
    if let Some(described) = described.as_object_mut() {
        common.for_each(|(key, value)| {
            described.entry(key).or_insert_with(|| value.clone());
        });
    }
    described
}

/// Whether the volume is writable. The check writes nothing and ignores locks of other programs.
fn is_writable(spec: &Spec) -> Result<bool, Failure> {
    let opens = |path: &Path| File::options().write(true).open(path).is_ok();
    for leaf in spec.leaves() {
        let is_writable = match leaf {
            Spec::File(file) => !file.read_only && opens(&file.path),
            Spec::Block(block) => !block.read_only && opens(&block.path),
            Spec::VhostUser(device) => !device.read_only,
            Spec::Rbd(image) => !image.read_only && image.snapshot.is_none(),
            Spec::Url(url) => reach::of_url(url.as_written())?.describe()?.json["read_only"] != true,
            _ => true,
        };
        if !is_writable {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Formats a heading, and a line for each row that is not empty.
fn table(heading: &str, rows: &[(&str, String)]) -> String {
    let rows = rows.iter().filter(|(_, value)| !value.is_empty());
    let lines = rows.map(|(key, value)| format!("\n  {key:<12} {}", printable(value)));
    format!("{}{}", printable(heading), lines.collect::<String>())
}

fn access(is_read_only: bool) -> &'static str {
    if is_read_only { "read-only" } else { "read-write" }
}

const EXAMPLES: &str = "\
With --json, the object of every volume has `volume`, `protocol` (null for one
of this machine), `size`, `read_only`, `logical_block`, `physical_block`,
`preferred_block`, `write_cache` and `volatile`, and keys of its protocol.

Examples:
  blockmux info nbd://192.0.2.7/disk0
  blockmux info 'nbd+unix:///disk0?socket=/run/nbd.sock' --json
  blockmux info file:disk.img";
