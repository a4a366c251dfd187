//! Limits of a volume's I/O, as the config file, `ctl` and the API write them.

use blockmux_volume::units::{
    UnitError, format_duration, format_size, human_size, parse_duration, parse_size,
};
use blockmux_volume::{BURSTS, DEFAULT_BURST, Limits};
use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, de};
use std::fmt;
use std::num::NonZeroU64;
use std::time::Duration;
use toml::{Table, Value};
use utoipa::ToSchema;

/// Keys of the tables `limits` and `client_limits` of a volume in the config.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct WrittenLimits {
    iops: Option<NonZeroU64>,
    read_iops: Option<NonZeroU64>,
    write_iops: Option<NonZeroU64>,
    bandwidth: Option<Bandwidth>,
    read_bandwidth: Option<Bandwidth>,
    write_bandwidth: Option<Bandwidth>,
    burst: Option<Burst>,
}

/// Bytes per second: a number, or a text such as `100m`.
#[derive(Clone, Copy)]
struct Bandwidth(NonZeroU64);

/// A duration such as `500ms`.
#[derive(Clone, Copy)]
struct Burst(Duration);

impl WrittenLimits {
    fn limits(&self) -> Limits {
        let mut limits = Limits::default();
        let bytes = |written: Option<Bandwidth>| written.map(|Bandwidth(bytes)| bytes);
        (limits.total.iops, limits.total.bytes_per_s) = (self.iops, bytes(self.bandwidth));
        (limits.read.iops, limits.read.bytes_per_s) = (self.read_iops, bytes(self.read_bandwidth));
        (limits.write.iops, limits.write.bytes_per_s) = (self.write_iops, bytes(self.write_bandwidth));
        limits.burst = self.burst.map_or(DEFAULT_BURST, |Burst(burst)| burst);
        limits
    }
}

impl Bandwidth {
    fn of(bytes: u64) -> Result<Bandwidth, String> {
        let bytes = NonZeroU64::new(bytes).ok_or("write a size above 0, as in 100m")?;
        if bytes.get() > MAX_LIMIT { Err("write a size below 8e".to_owned()) } else { Ok(Bandwidth(bytes)) }
    }

    fn parse(text: &str) -> Result<Bandwidth, String> {
        Bandwidth::of(parse_size(text).map_err(|error| error.to_string())?)
    }
}

impl<'de> Deserialize<'de> for Bandwidth {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Bandwidth, D::Error> {
        struct Bytes;
        impl Visitor<'_> for Bytes {
            type Value = Bandwidth;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("bytes per second, as 104857600 or \"100m\"")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Bandwidth, E> {
                Bandwidth::parse(text).map_err(E::custom)
            }

            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<Bandwidth, E> {
                Bandwidth::of(bytes.try_into().unwrap_or(0)).map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Bytes)
    }
}

impl Burst {
    fn parse(text: &str) -> Result<Burst, String> {
        let burst = parse_duration(text).map_err(|error: UnitError| error.to_string())?;
        if !BURSTS.contains(&burst) {
            return Err(format!("a burst of {text}: write {BURST_TEXT}"));
        }
        // The API's `burst_ms` would lose the fraction.
        let ms = burst.as_millis() as u64;
        if burst != Duration::from_millis(ms) {
            let whole = format_duration(Duration::from_millis(ms + 1));
            return Err(format!("a burst of {text}: write whole milliseconds, as in {whole}"));
        }
        Ok(Burst(burst))
    }
}

impl<'de> Deserialize<'de> for Burst {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Burst, D::Error> {
        Burst::parse(&String::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

/// Reads a table of the config.
pub(crate) fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Limits, D::Error> {
    WrittenLimits::deserialize(deserializer).map(|written| written.limits())
}

/// The table of the config; `None` if nothing is limited.
pub(crate) fn table(limits: &Limits) -> Option<Value> {
    let value = |(key, text): (&str, String)| {
        let number = text.parse().ok().filter(|_| key.ends_with("iops")).map(Value::Integer);
        (key.to_owned(), number.unwrap_or(Value::String(text)))
    };
    (!limits.is_unlimited()).then(|| Value::Table(pairs(limits).map(value).collect::<Table>()))
}

/// Parses the form of `ctl`: `iops=500,bandwidth=10m`, or `none`.
///
/// # Errors
/// What is wrong, and what to write.
pub(crate) fn parse(text: &str) -> Result<Limits, String> {
    let mut written = WrittenLimits::default();
    if text == NONE {
        return Ok(written.limits());
    }
    let mut seen = Vec::new();
    for pair in text.split(',').map(str::trim) {
        let (key, value) =
            pair.split_once('=').ok_or_else(|| format!("`{pair}` has no `=`: write KEY=VALUE, or {NONE}"))?;
        if seen.contains(&key) {
            return Err(format!("`{key}` is given twice: write it once"));
        }
        seen.push(key);
        let wrong = |error: String| format!("{key}: {error}");
        let iops = || value.parse().map(Some).map_err(|_| wrong("write a whole number from 1 on".to_owned()));
        let bandwidth = || Bandwidth::parse(value).map(Some).map_err(wrong);
        match key {
            "iops" => written.iops = iops()?,
            "read_iops" => written.read_iops = iops()?,
            "write_iops" => written.write_iops = iops()?,
            "bandwidth" => written.bandwidth = bandwidth()?,
            "read_bandwidth" => written.read_bandwidth = bandwidth()?,
            "write_bandwidth" => written.write_bandwidth = bandwidth()?,
            "burst" => written.burst = Burst::parse(value).map(Some).map_err(wrong)?,
            _ => return Err(format!("`{key}` is not a limit: write one of {}", KEYS.join(", "))),
        }
    }
    let limits = written.limits();
    if limits.is_unlimited() {
        return Err(format!("a burst limits nothing: add a limit, as in iops=500,{text}, or write {NONE}"));
    }
    Ok(limits)
}

/// The form that [`parse`] reads.
pub(crate) fn text(limits: &Limits) -> String {
    let pairs: Vec<_> = pairs(limits).map(|(key, value)| format!("{key}={value}")).collect();
    if limits.is_unlimited() { NONE.to_owned() } else { pairs.join(",") }
}

/// The keys that have a value, with their values.
fn pairs(limits: &Limits) -> impl Iterator<Item = (&'static str, String)> {
    let Limits { total, read, write, burst } = *limits;
    let iops = [total, read, write].map(|limit| limit.iops.map(|iops| iops.to_string()));
    let bandwidth = [total, read, write].map(|limit| limit.bytes_per_s.map(|bytes| format_size(bytes.get())));
    let burst = (burst != DEFAULT_BURST).then(|| format_duration(burst));
    let values = iops.into_iter().chain(bandwidth).chain([burst]);
    KEYS.into_iter().zip(values).filter_map(|(key, value)| Some((key, value?)))
}

/// Limits in bodies of the API.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct LimitsBody {
    /// Requests per second, reads and writes together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>, minimum = 1)]
    iops: Option<NonZeroU64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>, minimum = 1)]
    read_iops: Option<NonZeroU64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>, minimum = 1)]
    write_iops: Option<NonZeroU64>,
    /// Bytes per second, reads and writes together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>, minimum = 1)]
    bandwidth: Option<NonZeroU64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>, minimum = 1)]
    read_bandwidth: Option<NonZeroU64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>, minimum = 1)]
    write_bandwidth: Option<NonZeroU64>,
    /// How much of each limit may be saved up while less is used, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 3600000)]
    burst_ms: Option<u64>,
}

impl From<Limits> for LimitsBody {
    fn from(limits: Limits) -> LimitsBody {
        let Limits { total, read, write, burst } = limits;
        LimitsBody {
            iops: total.iops,
            read_iops: read.iops,
            write_iops: write.iops,
            bandwidth: total.bytes_per_s,
            read_bandwidth: read.bytes_per_s,
            write_bandwidth: write.bytes_per_s,
            burst_ms: (burst != DEFAULT_BURST).then_some(burst.as_millis() as u64),
        }
    }
}

impl LimitsBody {
    /// The limits.
    ///
    /// # Errors
    /// If the burst is too short or too long.
    pub(crate) fn limits(&self) -> Result<Limits, String> {
        let mut limits = Limits::default();
        let iops = [self.iops, self.read_iops, self.write_iops];
        let bandwidth = [self.bandwidth, self.read_bandwidth, self.write_bandwidth];
        for (key, value) in KEYS.into_iter().zip(iops.into_iter().chain(bandwidth)) {
            if value.is_some_and(|value| value.get() > MAX_LIMIT) {
                return Err(format!("{key}: write at most {MAX_LIMIT}"));
            }
        }
        (limits.total.iops, limits.total.bytes_per_s) = (self.iops, self.bandwidth);
        (limits.read.iops, limits.read.bytes_per_s) = (self.read_iops, self.read_bandwidth);
        (limits.write.iops, limits.write.bytes_per_s) = (self.write_iops, self.write_bandwidth);
        limits.burst = self.burst_ms.map_or(DEFAULT_BURST, Duration::from_millis);
        if !BURSTS.contains(&limits.burst) {
            return Err(format!("burst_ms: write {BURST_TEXT}"));
        }
        Ok(limits)
    }

    /// The limits in the form of `ctl`.
    pub(crate) fn text(&self) -> String {
        self.limits().map_or_else(|error| error, |limits| text(&limits))
    }

    /// The limits with their units: `500 IOPS, write 10 MiB/s`.
    pub(crate) fn summary(&self) -> String {
        let iops = [("", self.iops), ("read ", self.read_iops), ("write ", self.write_iops)];
        let iops = iops.into_iter().filter_map(|(kind, iops)| Some(format!("{kind}{} IOPS", iops?)));
        let bandwidth =
            [("", self.bandwidth), ("read ", self.read_bandwidth), ("write ", self.write_bandwidth)];
        let bandwidth = bandwidth
            .into_iter()
            .filter_map(|(kind, bytes)| Some(format!("{kind}{}/s", human_size(bytes?.get()))));
        let burst = self.burst_ms.map(|ms| format!("burst {}", format_duration(Duration::from_millis(ms))));
        iops.chain(bandwidth).chain(burst).collect::<Vec<_>>().join(", ")
    }
}

const KEYS: [&str; 7] =
    ["iops", "read_iops", "write_iops", "bandwidth", "read_bandwidth", "write_bandwidth", "burst"];
/// The text for no limits.
const NONE: &str = "none";
/// The largest integer of a config file, and of the API's document.
const MAX_LIMIT: u64 = i64::MAX as u64;
const BURST_TEXT: &str = "1 ms to 1 hour";

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_volume::Limit;
    use serde_json::json;

    #[derive(Deserialize)]
    struct Volume {
        #[serde(deserialize_with = "read")]
        limits: Limits,
    }

    #[test]
    fn the_config_ctl_and_the_api_write_the_same_limits() {
        let number = NonZeroU64::new;
        let expected = Limits {
            total: Limit { iops: number(500), bytes_per_s: number(10 << 20) },
            read: Limit { iops: None, bytes_per_s: number(4096) },
            write: Limit { iops: number(7), bytes_per_s: None },
            burst: Duration::from_secs(2),
        };
        let text = "iops=500,write_iops=7,bandwidth=10m,read_bandwidth=4k,burst=2s";
        assert_eq!(parse(text), Ok(expected));
        assert_eq!(super::text(&expected), text);
        let written =
            "limits = { iops = 500, write_iops = 7, bandwidth = '10m', read_bandwidth = 4096, burst = '2s' }";
        let volume: Volume = toml::from_str(written).unwrap();
        assert_eq!(volume.limits, expected);
        let exported = Table::from_iter([("limits".to_owned(), table(&expected).unwrap())]);
        let volume: Volume = toml::from_str(&toml::to_string(&exported).unwrap()).unwrap();
        assert_eq!(volume.limits, expected);
        let body = json!(LimitsBody::from(expected));
        assert_eq!(
            body,
            json!({ "iops": 500, "write_iops": 7, "bandwidth": 10 << 20, "read_bandwidth": 4096, "burst_ms": 2000 })
        );
        let body: LimitsBody = serde_json::from_value(body).unwrap();
        assert_eq!(body.limits(), Ok(expected));
        assert_eq!(body.summary(), "500 IOPS, write 7 IOPS, 10 MiB/s, read 4 KiB/s, burst 2s");
    }

    #[test]
    fn no_limits_are_none_an_empty_table_and_an_empty_body() {
        assert_eq!(parse("none"), Ok(Limits::default()));
        assert_eq!((text(&Limits::default()).as_str(), table(&Limits::default())), ("none", None));
        assert_eq!(LimitsBody::default().limits(), Ok(Limits::default()));
        let volume: Volume = toml::from_str("limits = {}").unwrap();
        assert!(volume.limits.is_unlimited());
    }

    #[test]
    fn an_invalid_limit_is_named_with_what_to_write() {
        for (text, expected) in [
            ("", "`` has no `=`"),
            ("iops", "`iops` has no `=`: write KEY=VALUE, or none"),
            ("iops=0", "iops: write a whole number from 1 on"),
            ("bandwidth=0", "bandwidth: write a size above 0"),
            ("bandwidth=8e", "bandwidth: write a size below 8e"),
            ("bandwidth=fast", "bandwidth: `fast` is not a size"),
            ("iops=1,burst=1us", "burst: a burst of 1us: write 1 ms to 1 hour"),
            ("iops=1,burst=1500us", "burst: a burst of 1500us: write whole milliseconds, as in 2ms"),
            ("iops=1,iops=2", "`iops` is given twice: write it once"),
            ("iops=1,bandwidth=1m, iops=1", "`iops` is given twice"),
            ("bw=1m", "`bw` is not a limit: write one of iops, read_iops,"),
            ("burst=1s", "a burst limits nothing: add a limit, as in iops=500,burst=1s"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.starts_with(expected), "{text}: {error}");
        }
        for (written, expected) in [
            ("limits = { iops = 0 }", "nonzero"),
            ("limits = { bandwidth = -1 }", "write a size above 0"),
            ("limits = { bandwidth = true }", "bytes per second"),
            ("limits = { burst = '2h' }", "write 1 ms to 1 hour"),
            ("limits = { burst = '1.0001s' }", "write whole milliseconds, as in 1001ms"),
            ("limits = { iops = 1, iops = 2 }", "duplicate key"),
            ("limits = { speed = 1 }", "unknown field `speed`, expected one of `iops`, `read_iops`"),
        ] {
            let error = toml::from_str::<Volume>(written).err().unwrap().to_string();
            assert!(error.contains(expected), "{written}: {error}");
        }
        let body: LimitsBody = serde_json::from_value(json!({ "burst_ms": 0 })).unwrap();
        assert!(body.limits().is_err());
        let body: LimitsBody = serde_json::from_value(json!({ "read_bandwidth": 1_u64 << 63 })).unwrap();
        assert_eq!(body.limits(), Err("read_bandwidth: write at most 9223372036854775807".to_owned()));
    }
}
