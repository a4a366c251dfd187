//! Parses volume specs.

use super::path::decode;
use super::secrets::with_hidden_secrets;
use super::write::EFFECTS;
use super::{
    BlockSpec, Decoration, FileSpec, ImageOwnership, LogTarget, MAX_NESTING, MemSpec, NullSpec, RbdSpec,
    SliceSpec, Spec, SpecError, Url, VhostUserSpec,
};
use crate::block_sizes::BlockSizes;
use crate::delay::Delays;
use crate::fault::{Fault, FaultEffect, FaultWhen};
use crate::kind::{OpKind, OpSet};
use crate::limiter::{BURSTS, Limits};
use crate::stripe::DEFAULT_CHUNK;
use crate::units::{parse_decimal, parse_duration, parse_size};
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

impl FromStr for Spec {
    type Err = SpecError;

    /// Errors quote no secret.
    fn from_str(text: &str) -> Result<Spec, SpecError> {
        read(text).map_err(|error| {
            let shown = with_hidden_secrets(text);
            if shown == text { error } else { read(&shown).err().unwrap_or_else(|| odd_secret(&shown)) }
        })
    }
}

fn read(text: &str) -> Result<Spec, SpecError> {
    if text.contains(|letter: char| letter.is_ascii_control()) {
        let remedy = "in a path write it with a per cent sign, such as %0A";
        return Err(SpecError(format!("`{}` contains a control character: {remedy}", text.escape_debug())));
    }
    Parser { spec: text, depth: 0 }.spec()
}

type Parsed<T> = Result<T, SpecError>;

/// A spec, perhaps inside another one.
#[derive(Clone, Copy)]
struct Parser<'a> {
    spec: &'a str,
    depth: u32,
}

impl<'a> Parser<'a> {
    fn spec(self) -> Parsed<Spec> {
        if self.spec.is_empty() {
            let text = "a volume is missing: name one, such as mem:1g or file:disk.img";
            return Err(SpecError(text.to_owned()));
        }
        if self.depth > MAX_NESTING {
            let remedy = "leave some decorators out";
            return Err(SpecError(format!("volumes are nested more than {MAX_NESTING} deep: {remedy}")));
        }
        if self.spec.starts_with('[') {
            return self.within(self.unbracketed()?).spec();
        }
        let Some((kind, rest)) = self.spec.split_once(':') else {
            return Err(if KINDS.contains(&self.spec) {
                self.missing("colon", "KIND:..., as in mem:1g, file:disk.img or delay:1ms:mem:1g")
            } else if parse_size(self.spec).is_ok() {
                self.no_kind(&format!("mem:{} for RAM", self.spec))
            } else {
                self.no_file_or_device()
            });
        };
        match kind {
            _ if is_scheme(kind) && rest.starts_with("//") && !KINDS.contains(&kind) => {
                let url = Url::new(self.spec);
                url.block_sizes()?;
                Ok(Spec::Url(url))
            }
            "mem" => self.mem(rest),
            "null" => self.null(rest),
            "file" => self.file(rest),
            "block" => self.block(rest),
            "vhost-user" => self.vhost_user(rest),
            "rbd" => self.rbd(rest),
            "slice" => self.slice(rest),
            "stripe" => self.stripe(rest),
            "delay" => self.delay(rest),
            "fault" => self.fault(rest),
            "rate" => self.rate(rest),
            "log" => self.log(rest),
            _ if kind.contains('/') => Err(self.no_file_or_device()),
            _ => {
                let known = format!("{}, or a URL such as nbd://host/export", KINDS.join(", "));
                Err(SpecError(format!("`{kind}` in `{}` is not a kind of volume: use {known}", self.spec)))
            }
        }
    }

    fn boxed(self) -> Parsed<Box<Spec>> {
        self.spec().map(Box::new)
    }

    fn within(self, spec: &'a str) -> Parser<'a> {
        Parser { spec, depth: self.depth + 1 }
    }

    /// Removes brackets around the whole spec.
    fn unbracketed(self) -> Parsed<&'a str> {
        let end =
            self.spec.bytes().scan(0, |depth, byte| Some(nesting(depth, byte))).position(|depth| depth == 0);
        let end = end.ok_or_else(|| self.brackets())?;
        if end + 1 == self.spec.len() { Ok(&self.spec[1..end]) } else { Err(self.brackets()) }
    }

    fn volume_size(self, text: &str) -> Parsed<u64> {
        if text.is_empty() {
            return Err(self.missing("size", "a size after the colon, as in mem:1g"));
        }
        match self.size(text) {
            // As QEMU and nbdkit write options.
            Err(_) if text.split(',').skip(1).any(|option| option.contains('=')) => {
                let is_option = self.spec.split_once('?').is_some_and(|(_, options)| options.contains(text));
                Err(self.value("size", text, if is_option { JOINED } else { BEHIND_QUESTION_MARK }))
            }
            Err(error) => Err(error),
            Ok(0) => Err(self.value("size", text, "a volume has at least one block, as in mem:1g")),
            Ok(size) => Ok(size),
        }
    }

    fn mem(self, rest: &str) -> Parsed<Spec> {
        let (size, options) = rest.split_once('?').unwrap_or((rest, ""));
        let mut mem = MemSpec::new(self.volume_size(size)?);
        for (key, value) in self.pairs(options, '&')? {
            match key {
                "populate" => mem.populate = self.on_off(key, value)?,
                _ if self.block_size(&mut mem.blocks, key, value)? => {}
                _ => {
                    let known = "populate, block_size and physical_block_size";
                    return Err(self.unknown(key, "a RAM volume", known));
                }
            }
        }
        Ok(Spec::Mem(mem))
    }

    fn null(self, rest: &str) -> Parsed<Spec> {
        let (size, options) = rest.split_once('?').unwrap_or((rest, ""));
        let mut null = NullSpec::new(self.volume_size(size)?);
        for (key, value) in self.pairs(options, '&')? {
            if !self.block_size(&mut null.blocks, key, value)? {
                return Err(self.unknown(key, "a null volume", "block_size and physical_block_size"));
            }
        }
        Ok(Spec::Null(null))
    }

    fn file(self, rest: &str) -> Parsed<Spec> {
        let (path, options) = self.path_and_options(rest, "file:PATH, as in file:disk.img?size=1g")?;
        let mut file = FileSpec::new(path);
        for (key, value) in self.pairs(options, '&')? {
            match key {
                "size" => file.size = Some(self.volume_size(value)?),
                "mode" => file.mode = Some(self.mode(value)?),
                "direct" => file.direct = Some(self.on_off(key, value)?),
                "readonly" => file.read_only = self.on_off(key, value)?,
                "format" => file.is_raw = self.raw(key, value)?,
                _ if self.block_size(&mut file.blocks, key, value)? => {}
                _ => {
                    let known = "size, mode, direct, readonly, format, block_size and physical_block_size";
                    return Err(self.unknown(key, "a file", known));
                }
            }
        }
        Ok(Spec::File(file))
    }

    fn block(self, rest: &str) -> Parsed<Spec> {
        let (path, options) = self.path_and_options(rest, "block:PATH, as in block:/dev/nvme0n1")?;
        let blocks = BlockSizes::default();
        let mut block = BlockSpec { path, direct: None, read_only: false, is_raw: false, blocks };
        for (key, value) in self.pairs(options, '&')? {
            match key {
                "direct" => block.direct = Some(self.on_off(key, value)?),
                "readonly" => block.read_only = self.on_off(key, value)?,
                "format" => block.is_raw = self.raw(key, value)?,
                _ if self.block_size(&mut block.blocks, key, value)? => {}
                _ => {
                    let known = "direct, readonly, format, block_size and physical_block_size";
                    return Err(self.unknown(key, "a block device", known));
                }
            }
        }
        Ok(Spec::Block(block))
    }

    fn vhost_user(self, rest: &str) -> Parsed<Spec> {
        let (path, options) =
            self.path_and_options(rest, "vhost-user:PATH, as in vhost-user:/run/disk.sock")?;
        let mut device = VhostUserSpec {
            path,
            read_only: false,
            reconnect: None,
            timeout: None,
            blocks: BlockSizes::default(),
        };
        for (key, value) in self.pairs(options, '&')? {
            match key {
                "readonly" => device.read_only = self.on_off(key, value)?,
                "reconnect" => device.reconnect = Some(self.duration(value)?),
                "timeout" => device.timeout = Some(self.duration(value)?),
                _ if self.block_size(&mut device.blocks, key, value)? => {}
                _ => {
                    let known = "readonly, reconnect, timeout, block_size and physical_block_size";
                    return Err(self.unknown(key, "a vhost-user device", known));
                }
            }
        }
        Ok(Spec::VhostUser(device))
    }

    fn rbd(self, rest: &'a str) -> Parsed<Spec> {
        let (name, options) = rest.split_once('?').unwrap_or((rest, ""));
        let mut image = self.rbd_image(name)?;
        for (key, value) in self.pairs(options, '&')? {
            match key {
                "id" if value.is_empty() => {
                    return Err(self.value(key, value, "write a user, as in id=admin"));
                }
                "id" => image.id = Some(self.ceph_name(value)?),
                "conf" => image.conf = Some(decode(value)?),
                "keyring" => image.keyring = Some(decode(value)?),
                "readonly" => image.read_only = self.on_off(key, value)?,
                "exclusive" => image.ownership = self.ownership(key, value)?,
                "timeout" => {
                    let time = self.duration(value)?;
                    if time < Duration::from_secs(1) || time > MAX_CEPH_TIMEOUT {
                        return Err(self.value(key, value, "write 1s to 1h"));
                    }
                    image.timeout = Some(time);
                }
                _ if self.block_size(&mut image.blocks, key, value)? => {}
                _ => {
                    let known =
                        "id, conf, keyring, readonly, exclusive, timeout, block_size and physical_block_size";
                    return Err(self.unknown(key, "an RBD image", known));
                }
            }
        }
        if image.ownership.is_exclusive() && (image.read_only || image.snapshot.is_some()) {
            let what = "leave it out: an image that is only read has no owner";
            return Err(self.value("exclusive", "on", what));
        }
        Ok(Spec::Rbd(image))
    }

    fn ownership(self, key: &str, value: &str) -> Parsed<ImageOwnership> {
        let found = ImageOwnership::WORDS.iter().find(|(word, _)| *word == value);
        found
            .map(|(_, ownership)| *ownership)
            .ok_or_else(|| self.value(key, value, "write on, off, take, standby or group"))
    }

    /// Parses the pool, the namespace, the image and the snapshot.
    fn rbd_image(self, name: &str) -> Parsed<RbdSpec> {
        if name.contains(':') {
            // As QEMU writes options.
            let what = "the image's name";
            return Err(self.value(
                what,
                name,
                "options follow a question mark, as in rbd:pool/image?id=admin",
            ));
        }
        let (place, snapshot) = match name.split_once('@') {
            Some((place, snapshot)) => (place, Some(self.ceph_name(snapshot)?)),
            None => (name, None),
        };
        let names: Vec<_> = place.split('/').map(|name| self.ceph_name(name)).collect::<Parsed<_>>()?;
        let new = |pool: &str, image: &str| RbdSpec::new(pool.to_owned(), image.to_owned());
        let image = match &names[..] {
            [pool, image] => new(pool, image),
            [pool, namespace, image] => RbdSpec { namespace: Some(namespace.clone()), ..new(pool, image) },
            _ => return Err(self.missing("pool and image", RBD_FORM)),
        };
        Ok(RbdSpec { snapshot, ..image })
    }

    fn ceph_name(self, text: &str) -> Parsed<String> {
        let name = decode(text)?.into_os_string().into_string();
        let name = name.map_err(|_| self.value("a name of Ceph", text, "write UTF-8"))?;
        if name.is_empty() { Err(self.missing("pool and image", RBD_FORM)) } else { Ok(name) }
    }

    /// Reads one of the two block sizes; `false` if the key is another option.
    fn block_size(self, blocks: &mut BlockSizes, key: &str, value: &str) -> Parsed<bool> {
        let size = match key {
            BlockSizes::LOGICAL => &mut blocks.logical,
            BlockSizes::PHYSICAL => &mut blocks.physical,
            _ => return Ok(false),
        };
        let bytes = u32::try_from(self.size(value)?).ok();
        let bytes = bytes.filter(|bytes| bytes.is_power_of_two() && BlockSizes::RANGE.contains(bytes));
        *size = Some(bytes.ok_or_else(|| self.value(key, value, "write a power of two from 512 to 64k"))?);
        if let (Some(logical), Some(physical)) = (blocks.logical, blocks.physical)
            && physical < logical
        {
            return Err(self.value(key, value, "write a physical block at least as large as block_size"));
        }
        Ok(true)
    }

    fn mode(self, value: &str) -> Parsed<u32> {
        let is_octal =
            (3..=4).contains(&value.len()) && value.bytes().all(|byte| (b'0'..=b'7').contains(&byte));
        let mode = u32::from_str_radix(value, 8).ok().filter(|mode| is_octal && *mode <= 0o777);
        mode.ok_or_else(|| self.value("mode", value, "write permissions in octal, as 0640"))
    }

    fn raw(self, key: &str, value: &str) -> Parsed<bool> {
        if value == "raw" {
            Ok(true)
        } else {
            Err(self.value(key, value, "only raw; qemu-nbd serves other formats"))
        }
    }

    fn path_and_options(self, rest: &'a str, form: &'static str) -> Parsed<(PathBuf, &'a str)> {
        let (path, options) = rest.split_once('?').unwrap_or((rest, ""));
        if path.is_empty() { Err(self.missing("path", form)) } else { Ok((decode(path)?, options)) }
    }

    fn slice(self, rest: &'a str) -> Parsed<Spec> {
        let (range, volume) =
            self.decorated(rest, "slice:OFFSET[,LEN]:VOLUME, as in slice:1m,10g:file:disk.img")?;
        let (offset, len) = range.split_once(',').map_or((range, None), |(offset, len)| (offset, Some(len)));
        let slice =
            SliceSpec { offset: self.size(offset)?, len: len.map(|len| self.volume_size(len)).transpose()? };
        Ok(Spec::Slice(slice, volume.boxed()?))
    }

    fn stripe(self, rest: &'a str) -> Parsed<Spec> {
        // No kind of volume begins with a digit, so this must be a chunk size.
        let has_chunk = rest.starts_with(|first: char| first.is_ascii_digit());
        let (chunk, members) = match rest.split_once(':') {
            Some((chunk, members)) if has_chunk => (self.size(chunk)?, members),
            None if has_chunk => (self.size(rest)?, ""),
            _ => (DEFAULT_CHUNK, rest),
        };
        if chunk == 0 {
            return Err(self.value("the chunk", "0", "write a size, as in stripe:64k:mem:1g,mem:1g"));
        }
        if members.is_empty() {
            return Err(self.missing("member", "stripe:VOLUME,VOLUME, as in stripe:mem:1g,mem:1g"));
        }
        let members = self.split_members(members)?;
        let members: Parsed<_> = members.into_iter().map(|member| self.within(member).spec()).collect();
        Ok(Spec::Stripe { chunk, members: members? })
    }

    /// Splits at the commas outside of brackets.
    fn split_members(self, text: &'a str) -> Parsed<Vec<&'a str>> {
        let (mut members, mut depth, mut start) = (Vec::new(), 0, 0);
        for (at, byte) in text.bytes().enumerate() {
            depth = nesting(&mut depth, byte);
            if depth < 0 {
                return Err(self.brackets());
            }
            if byte == b',' && depth == 0 {
                members.push(&text[start..at]);
                start = at + 1;
            }
        }
        members.push(&text[start..]);
        if depth == 0 { Ok(members) } else { Err(self.brackets()) }
    }

    fn delay(self, rest: &'a str) -> Parsed<Spec> {
        let (times, volume) =
            self.decorated(rest, "delay:READ[,WRITE]:VOLUME, as in delay:100us,5ms:mem:1g")?;
        let (read, write) = times.split_once(',').unwrap_or((times, times));
        let (read, write) = (self.duration(read)?, self.duration(write)?);
        Ok(Spec::Decorated(Decoration::Delay(Delays { read, write, flush: write }), volume.boxed()?))
    }

    fn fault(self, rest: &'a str) -> Parsed<Spec> {
        let (keys, volume) = self.decorated(rest, "fault:KEY=VALUE:VOLUME, as in fault:every=100:mem:1g")?;
        let mut fault = Fault::default();
        let mut has_when = false;
        for (key, value) in self.pairs(keys, ',')? {
            match key {
                "op" => fault.ops = self.ops(value)?,
                "offset" => fault.offset = self.size(value)?,
                "size" => fault.size = Some(self.size(value)?),
                "every" | "probability" if has_when => return Err(self.twice(key)),
                "every" => fault.when = FaultWhen::Every(self.positive(key, value)?.get()),
                "probability" => fault.when = FaultWhen::PerMillion(self.chance(key, value)?),
                "seed" => fault.seed = self.number(key, value)?,
                "error" => fault.effect = self.effect(value)?,
                _ => return Err(self.unknown(key, "a fault", FAULT_KEYS)),
            }
            has_when |= matches!(key, "every" | "probability");
        }
        Ok(Spec::Decorated(Decoration::Fault(fault), volume.boxed()?))
    }

    fn rate(self, rest: &'a str) -> Parsed<Spec> {
        let (keys, volume) =
            self.decorated(rest, "rate:KEY=VALUE:VOLUME, as in rate:iops=1000,bw=100m:mem:1g")?;
        let mut limits = Limits::default();
        for (key, value) in self.pairs(keys, ',')? {
            if key == "burst" {
                limits.burst = self.duration(value)?;
                if !BURSTS.contains(&limits.burst) {
                    return Err(self.value(key, value, "write 1ms to 1h"));
                }
                continue;
            }
            let (limit, what) = match key.split_once('_') {
                Some(("read", what)) => (&mut limits.read, what),
                Some(("write", what)) => (&mut limits.write, what),
                _ => (&mut limits.total, key),
            };
            match what {
                "iops" => limit.iops = Some(self.positive(key, value)?),
                "bw" => {
                    let bytes = NonZeroU64::new(self.size(value)?);
                    limit.bytes_per_s = Some(bytes.ok_or_else(|| self.value(key, value, POSITIVE_SIZE))?);
                }
                _ => return Err(self.unknown(key, "a rate", RATE_KEYS)),
            }
        }
        Ok(Spec::Decorated(Decoration::Rate(limits), volume.boxed()?))
    }

    fn log(self, rest: &'a str) -> Parsed<Spec> {
        let (path, volume) = self.decorated(rest, "log:PATH:VOLUME, as in log:-:mem:1g")?;
        let target = if path == "-" { LogTarget::Stderr } else { LogTarget::File(decode(path)?) };
        Ok(Spec::Decorated(Decoration::Log(target), volume.boxed()?))
    }

    /// Splits a decorator's settings, which must not be empty, from its volume. The volume is
    /// parsed last: if the settings are missing, that is the error to report.
    fn decorated(self, rest: &'a str, form: &'static str) -> Parsed<(&'a str, Parser<'a>)> {
        let (before, volume) = rest.split_once(':').unwrap_or((rest, ""));
        if before.is_empty() {
            return Err(self.missing("setting", form));
        }
        if volume.is_empty() {
            let in_stripe =
                "a volume after the last colon; put a stripe's member that contains a comma in brackets";
            return Err(self.missing("volume", if self.depth == 0 { form } else { in_stripe }));
        }
        Ok((before, self.within(volume)))
    }

    /// Parses `key=value` pairs; each key may occur once.
    fn pairs(self, text: &'a str, between: char) -> Parsed<Vec<(&'a str, &'a str)>> {
        let mut pairs: Vec<(&str, &str)> = Vec::new();
        for pair in text.split(between).filter(|_| !text.is_empty()) {
            let Some((key, value)) = pair.split_once('=') else {
                return Err(SpecError(format!("`{pair}` in `{}` has no `=`: write KEY=VALUE", self.spec)));
            };
            if pairs.iter().any(|(known, _)| *known == key) {
                return Err(self.twice(key));
            }
            pairs.push((key, value));
        }
        Ok(pairs)
    }

    fn size(self, text: &str) -> Parsed<u64> {
        parse_size(text).map_err(|error| SpecError(format!("in `{}`: {error}", self.spec)))
    }

    fn duration(self, text: &str) -> Parsed<Duration> {
        parse_duration(text).map_err(|error| SpecError(format!("in `{}`: {error}", self.spec)))
    }

    fn number(self, key: &str, text: &str) -> Parsed<u64> {
        text.parse().map_err(|_| self.value(key, text, "write a whole number"))
    }

    fn positive(self, key: &str, text: &str) -> Parsed<NonZeroU64> {
        text.parse().map_err(|_| self.value(key, text, "write a whole number of at least 1"))
    }

    fn chance(self, key: &str, text: &str) -> Parsed<u32> {
        let per_million = parse_decimal(text, 6).ok().filter(|&share| share <= 1_000_000);
        let per_million = per_million.ok_or_else(|| self.value(key, text, "write 0 to 1, as in 0.01"))?;
        Ok(per_million as u32)
    }

    fn on_off(self, key: &str, text: &str) -> Parsed<bool> {
        match text {
            "on" => Ok(true),
            "off" => Ok(false),
            _ => Err(self.value(key, text, "write on or off")),
        }
    }

    fn ops(self, text: &str) -> Parsed<OpSet> {
        text.split('+').try_fold(OpSet::NONE, |set, word| {
            let kind = OpKind::ALL.into_iter().find(|kind| kind.name() == word);
            let kind = kind.ok_or_else(|| {
                self.value("op", word, "join read, write, flush, zeroes, discard, prefetch and status with +")
            })?;
            Ok(set.with(kind))
        })
    }

    fn effect(self, text: &str) -> Parsed<FaultEffect> {
        let named = EFFECTS.iter().find(|(name, _)| *name == text);
        named.map(|(_, effect)| *effect).ok_or_else(|| self.value("error", text, ERRORS))
    }

    fn missing(self, what: &'static str, form: &'static str) -> SpecError {
        SpecError(format!("`{}` has no {what}: write {form}", self.spec))
    }

    fn twice(self, key: &str) -> SpecError {
        let remedy = "is given twice, or excludes another key: leave one out";
        SpecError(format!("`{key}` in `{}` {remedy}", self.spec))
    }

    fn unknown(self, key: &str, kind: &'static str, known: &'static str) -> SpecError {
        SpecError(format!("`{key}` in `{}` is not an option of {kind}: it has {known}", self.spec))
    }

    fn value(self, key: &str, value: &str, expected: &'static str) -> SpecError {
        SpecError(format!("`{value}` is not a value for {key} in `{}`: {expected}", self.spec))
    }

    fn brackets(self) -> SpecError {
        let remedy = "put [ before and ] after a whole volume";
        SpecError(format!("brackets in `{}` are unbalanced, or text follows them: {remedy}", self.spec))
    }

    fn no_file_or_device(self) -> SpecError {
        self.no_kind(&format!("file:{0} for a file, block:{0} for a device", self.spec))
    }

    fn no_kind(self, forms: &str) -> SpecError {
        SpecError(format!("`{}` does not say what kind of volume it is: write {forms}", self.spec))
    }
}

/// The error of a text of which only one with other secrets can be parsed.
fn odd_secret(shown: &str) -> SpecError {
    let remedy = "put it in a file and give secret_file=PATH";
    SpecError(format!("`{shown}` has a secret with a character that is not possible there: {remedy}"))
}

impl Url {
    /// The block sizes among the URL's parameters.
    ///
    /// # Errors
    /// If one is given twice or is not a block size.
    pub fn block_sizes(&self) -> Result<BlockSizes, SpecError> {
        let mut blocks = BlockSizes::default();
        let shown = self.to_string();
        let parser = Parser { spec: &shown, depth: 0 };
        for (key, value) in self.block_parameters() {
            let is_twice = match key {
                BlockSizes::LOGICAL => blocks.logical.is_some(),
                _ => blocks.physical.is_some(),
            };
            if is_twice {
                return Err(parser.twice(key));
            }
            parser.block_size(&mut blocks, key, value)?;
        }
        Ok(blocks)
    }
}

/// Whether the text is a URL scheme (RFC 3986 §3.1).
fn is_scheme(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphabetic())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
}

/// Depth of brackets after `byte`.
fn nesting(depth: &mut i32, byte: u8) -> i32 {
    *depth += match byte {
        b'[' => 1,
        b']' => -1,
        _ => 0,
    };
    *depth
}

const KINDS: [&str; 12] =
    ["mem", "null", "file", "block", "vhost-user", "rbd", "slice", "stripe", "delay", "fault", "rate", "log"];
const RBD_FORM: &str = "rbd:POOL/IMAGE, as in rbd:rbd/disk or rbd:pool/namespace/disk@snapshot?id=admin";
const MAX_CEPH_TIMEOUT: Duration = Duration::from_secs(3600);
const FAULT_KEYS: &str = "op, offset, size, every, probability, error and seed";
const RATE_KEYS: &str = "iops, bw, read_iops, read_bw, write_iops, write_bw and burst";
const POSITIVE_SIZE: &str = "write a size above 0, as in 100m";
const ERRORS: &str = "write medium, nospace, readonly, reserved, unsupported, nomemory, pathlost, aborted, shutdown, range, \
                      misaligned, length or stuck";
const BEHIND_QUESTION_MARK: &str = "options follow a question mark, as in mem:1g?block_size=4096";
const JOINED: &str = "options are joined by `&`, as in ?size=1g&direct=on";
