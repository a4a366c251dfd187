//! Formats volume specs.

use super::path::{encode, encode_name, encode_value};
use super::{Decoration, ImageOwnership, LogTarget, RbdSpec, Spec};
use crate::block_sizes::BlockSizes;
use crate::delay::Delays;
use crate::fault::{Fault, FaultEffect, FaultWhen};
use crate::io::IoError;
use crate::kind::OpSet;
use crate::limiter::{DEFAULT_BURST, Limits};
use crate::stripe::DEFAULT_CHUNK;
use crate::units::{format_duration, format_size};
use std::fmt;

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Spec::Mem(mem) => {
                let options = [("populate", (!mem.populate).then_some("off"))];
                write!(f, "mem:{}{}", format_size(mem.size), options_text(options, mem.blocks))
            }
            Spec::Null(null) => {
                write!(f, "null:{}{}", format_size(null.size), options_text([], null.blocks))
            }
            Spec::File(file) => {
                let size = file.size.map(format_size);
                let mode = file.mode.map(|mode| format!("{mode:04o}"));
                let options = [
                    ("size", size.as_deref()),
                    ("mode", mode.as_deref()),
                    ("direct", file.direct.map(on_off)),
                    ("readonly", file.read_only.then_some("on")),
                    ("format", file.is_raw.then_some("raw")),
                ];
                write!(f, "file:{}{}", encode(&file.path), options_text(options, file.blocks))
            }
            Spec::Block(block) => {
                let options = [
                    ("direct", block.direct.map(on_off)),
                    ("readonly", block.read_only.then_some("on")),
                    ("format", block.is_raw.then_some("raw")),
                ];
                write!(f, "block:{}{}", encode(&block.path), options_text(options, block.blocks))
            }
            Spec::VhostUser(device) => {
                let [reconnect, timeout] =
                    [device.reconnect, device.timeout].map(|time| time.map(format_duration));
                let options = [
                    ("readonly", device.read_only.then_some("on")),
                    ("reconnect", reconnect.as_deref()),
                    ("timeout", timeout.as_deref()),
                ];
                write!(f, "vhost-user:{}{}", encode(&device.path), options_text(options, device.blocks))
            }
            Spec::Rbd(image) => write_rbd(f, image),
            Spec::Slice(slice, volume) => {
                let len = slice.len.map(|len| format!(",{}", format_size(len))).unwrap_or_default();
                write!(f, "slice:{}{len}:{volume}", format_size(slice.offset))
            }
            Spec::Stripe { chunk, members } => write_stripe(f, *chunk, members),
            Spec::Decorated(decoration, volume) => write!(f, "{decoration}:{volume}"),
            Spec::Url(url) => url.fmt(f),
        }
    }
}

impl fmt::Display for Decoration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Decoration::Delay(delays) => write!(f, "delay:{}", delay_text(*delays)),
            Decoration::Fault(fault) => write!(f, "fault{}", fault_text(fault)),
            Decoration::Rate(limits) => write!(f, "rate{}", rate_text(limits)),
            Decoration::Log(LogTarget::Stderr) => f.write_str("log:-"),
            // A file of this name; not encoded, it would mean standard error.
            Decoration::Log(LogTarget::File(path)) if path.as_os_str() == "-" => f.write_str("log:%2D"),
            Decoration::Log(LogTarget::File(path)) => write!(f, "log:{}", encode(path)),
        }
    }
}

fn write_rbd(f: &mut fmt::Formatter<'_>, image: &RbdSpec) -> fmt::Result {
    write!(f, "rbd:{}/", encode_name(&image.pool))?;
    if let Some(namespace) = &image.namespace {
        write!(f, "{}/", encode_name(namespace))?;
    }
    f.write_str(&encode_name(&image.image))?;
    if let Some(snapshot) = &image.snapshot {
        write!(f, "@{}", encode_name(snapshot))?;
    }
    let id = image.id.as_deref().map(encode_name);
    let [conf, keyring] = [&image.conf, &image.keyring].map(|path| path.as_deref().map(encode_value));
    let timeout = image.timeout.map(format_duration);
    let word = ImageOwnership::WORDS.iter().find(|(_, ownership)| *ownership == image.ownership);
    let exclusive = word.filter(|_| image.ownership.is_exclusive()).map(|(word, _)| *word);
    let options = [
        ("id", id.as_deref()),
        ("conf", conf.as_deref()),
        ("keyring", keyring.as_deref()),
        ("readonly", image.read_only.then_some("on")),
        ("exclusive", exclusive),
        ("timeout", timeout.as_deref()),
    ];
    f.write_str(&options_text(options, image.blocks))
}

fn write_stripe(f: &mut fmt::Formatter<'_>, chunk: u64, members: &[Spec]) -> fmt::Result {
    f.write_str("stripe:")?;
    if chunk != DEFAULT_CHUNK {
        write!(f, "{}:", format_size(chunk))?;
    }
    for (nth, member) in members.iter().enumerate() {
        f.write_str(if nth == 0 { "" } else { "," })?;
        let text = member.to_string();
        let ends_itself = !text.contains(',');
        if ends_itself { f.write_str(&text) } else { write!(f, "[{text}]") }?;
    }
    Ok(())
}

/// The options of a volume, and its block sizes, which all volumes have.
fn options_text<const N: usize>(options: [(&str, Option<&str>); N], blocks: BlockSizes) -> String {
    let sizes = [(BlockSizes::LOGICAL, blocks.logical), (BlockSizes::PHYSICAL, blocks.physical)];
    let sizes = sizes.map(|(key, bytes)| (key, bytes.map(|bytes| format_size(bytes.into()))));
    joined('?', '&', options.into_iter().chain(sizes.iter().map(|(key, size)| (*key, size.as_deref()))))
}

fn delay_text(delays: Delays) -> String {
    let read = format_duration(delays.read);
    if delays.write == delays.read { read } else { format!("{read},{}", format_duration(delays.write)) }
}

fn fault_text(fault: &Fault) -> String {
    let usual = Fault::default();
    let ops = (fault.ops != OpSet::ALL).then(|| fault.ops.to_string());
    let offset = (fault.offset != 0).then(|| format_size(fault.offset));
    let size = fault.size.map(format_size);
    let (every, chance) = match fault.when {
        FaultWhen::Every(nth) => (Some(nth.to_string()), None),
        FaultWhen::PerMillion(share) => (None, Some(chance_text(share))),
    };
    let effect = (fault.effect != usual.effect).then(|| effect_name(fault.effect));
    let seed = (fault.seed != 0).then(|| fault.seed.to_string());
    let keys = [
        ("op", ops.as_deref()),
        ("offset", offset.as_deref()),
        ("size", size.as_deref()),
        ("every", every.as_deref()),
        ("probability", chance.as_deref()),
        ("error", effect),
        ("seed", seed.as_deref()),
    ];
    joined(':', ',', keys)
}

fn chance_text(per_million: u32) -> String {
    let text = format!("{}.{:06}", per_million / 1_000_000, per_million % 1_000_000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn rate_text(limits: &Limits) -> String {
    let of = |limit: crate::limiter::Limit| {
        [limit.iops.map(|iops| iops.to_string()), limit.bytes_per_s.map(|bytes| format_size(bytes.get()))]
    };
    let [total, read, write] = [limits.total, limits.read, limits.write].map(of);
    let burst = (limits.burst != DEFAULT_BURST).then(|| format_duration(limits.burst));
    let names = ["iops", "bw", "read_iops", "read_bw", "write_iops", "write_bw", "burst"];
    let values: Vec<_> =
        [&total, &read, &write].into_iter().flatten().chain([&burst]).map(Option::as_deref).collect();
    joined(':', ',', names.into_iter().zip(values))
}

/// Joins the options that have a value.
fn joined<'a>(
    first: char,
    between: char,
    options: impl IntoIterator<Item = (&'a str, Option<&'a str>)>,
) -> String {
    let mut text = String::new();
    for (key, value) in options {
        if let Some(value) = value {
            text.push(if text.is_empty() { first } else { between });
            text.extend([key, "=", value]);
        }
    }
    text
}

fn on_off(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

fn effect_name(effect: FaultEffect) -> &'static str {
    let named = EFFECTS.iter().find(|(_, known)| *known == effect);
    named.map_or("stuck", |(name, _)| name)
}

/// Names of the effects of a fault.
pub(super) const EFFECTS: [(&str, FaultEffect); 13] = [
    ("medium", FaultEffect::Fail(IoError::Medium)),
    ("nospace", FaultEffect::Fail(IoError::NoSpace)),
    ("readonly", FaultEffect::Fail(IoError::ReadOnly)),
    ("reserved", FaultEffect::Fail(IoError::Reserved)),
    ("unsupported", FaultEffect::Fail(IoError::Unsupported)),
    ("nomemory", FaultEffect::Fail(IoError::NoMemory)),
    ("pathlost", FaultEffect::Fail(IoError::PathLost)),
    ("aborted", FaultEffect::Fail(IoError::Aborted)),
    ("shutdown", FaultEffect::Fail(IoError::ShuttingDown)),
    ("range", FaultEffect::Fail(IoError::OutOfRange)),
    ("misaligned", FaultEffect::Fail(IoError::Misaligned)),
    ("length", FaultEffect::Fail(IoError::BadLength)),
    ("stuck", FaultEffect::Stuck),
];
