//! Numbers in fio's formats: sizes with a suffix, times with a unit, shares in per cent.
//!
//! Every unit of a size is a power of 1024, as in a volume's spec: `4k`, `4kb` and `4kib` are 4096.
//! fio differs only for `kib` and similar units, which are powers of 1000 there unless
//! `kb_base=1000` is given. A fraction counts, which fio ignores (`4.5k` is 4 bytes there). `4ki`
//! is refused, and so is other text after the digits.

use blockmux_volume::units::{UnitError, size_unit};
use serde::{Deserialize, Serialize};
use std::fmt;

/// An offset or length in a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Size {
    /// This many bytes.
    Bytes(u64),
    /// Per cent of the volume, 0 to 100.
    Percent(u8),
}

impl Size {
    /// Length 0, or the start of the volume.
    pub const ZERO: Size = Size::Bytes(0);

    /// The size in bytes for a volume of `whole` bytes; a percentage is rounded down to a byte.
    #[must_use]
    pub fn of(self, whole: u64) -> u64 {
        match self {
            Size::Bytes(bytes) => bytes,
            Size::Percent(percent) => (u128::from(whole) * u128::from(percent) / 100) as u64,
        }
    }

    /// The size in fio's format: `64k`, `1g`, `50%`; see [`short`].
    #[must_use]
    pub fn short(self) -> String {
        match self {
            Size::Bytes(bytes) => short(bytes),
            Size::Percent(_) => self.to_string(),
        }
    }
}

/// Bytes with the largest of fio's suffixes that divides them: `4k`, `1m`, `513`.
#[must_use]
pub fn short(bytes: u64) -> String {
    let units = [(1 << 40, 't'), (1 << 30, 'g'), (1 << 20, 'm'), (1 << 10, 'k')];
    let whole = units.into_iter().find(|&(unit, _)| bytes > 0 && bytes.is_multiple_of(unit));
    whole.map_or_else(|| bytes.to_string(), |(unit, suffix)| format!("{}{suffix}", bytes / unit))
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Size::Bytes(bytes) => write!(f, "{bytes}"),
            Size::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

impl From<Size> for String {
    fn from(size: Size) -> String {
        size.to_string()
    }
}

impl TryFrom<String> for Size {
    type Error = String;

    fn try_from(text: String) -> Result<Size, String> {
        parse_size(&text)
    }
}

/// Parses `4096`, `0x1000`, `4k`, `1.5g`, `1gb`, `1gib`.
///
/// # Errors
/// The problem, as the end of a sentence.
pub fn parse_int(text: &str) -> Result<u64, String> {
    if text.contains('.') {
        return blockmux_volume::units::parse_size(text).map_err(|error| match error {
            UnitError::NotWhole(..) => "not a whole number of bytes".into(),
            UnitError::TooLarge(_) => TOO_LARGE.into(),
            _ => BAD_SUFFIX.into(),
        });
    }
    let (number, suffix) = split_number(text)?;
    let unit = size_unit(suffix).ok_or(BAD_SUFFIX)?;
    number.checked_mul(unit).ok_or_else(|| TOO_LARGE.into())
}

/// Parses a size as [`parse_int`] does, or a percentage such as `50%`.
///
/// # Errors
/// The problem, as the end of a sentence.
pub fn parse_size(text: &str) -> Result<Size, String> {
    let Some(percent) = text.strip_suffix('%') else {
        return parse_int(text).map(Size::Bytes);
    };
    match percent.parse() {
        Ok(percent @ 0..=100) if text.starts_with(|c: char| c.is_ascii_digit()) => Ok(Size::Percent(percent)),
        _ => Err("a percentage is a whole number from 0% to 100%".into()),
    }
}

/// Parses a time in milliseconds: seconds, or with a unit `us`, `ms`, `s`, `m`, `h`, `d` (also
/// `usec`, `msec`, `sec`). Unlike in fio, seconds may have a fraction (`0.5`), down to a
/// millisecond.
///
/// # Errors
/// The problem, as the end of a sentence.
pub fn parse_time_ms(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit_us = match unit.trim_start().to_ascii_lowercase().as_str() {
        "us" | "usec" => 1,
        "ms" | "msec" => 1000,
        "" | "s" | "sec" => US_PER_S,
        "m" => 60 * US_PER_S,
        "h" => 3600 * US_PER_S,
        "d" => 86_400 * US_PER_S,
        _ => return Err("a time ends in us, ms, s, m, h, d, or nothing for seconds".into()),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if fraction.is_empty() || fraction.len() > MAX_FRACTION_DIGITS || fraction.contains('.') {
        return Err("not a number with at most six decimals".into());
    }
    let read = |digits: &str| digits.parse::<u64>().map_err(|_| "not a number".to_owned());
    let scale = 10_u64.pow(fraction.len() as u32);
    let fraction_us = read(fraction)? * unit_us / scale;
    let total_us = read(whole)?.checked_mul(unit_us).and_then(|us| us.checked_add(fraction_us));
    Ok(total_us.ok_or(TOO_LARGE)? / 1000)
}

/// Splits `4k` into 4 and `k`.
fn split_number(text: &str) -> Result<(u64, &str), String> {
    let hex = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"));
    let (body, radix) = hex.map_or((text, 10), |hex| (hex, 16));
    // A hexadecimal number takes as many digits as possible, so `0x1b` is 27 and not one byte.
    let end = body.find(|c: char| !c.is_digit(radix)).unwrap_or(body.len());
    let (digits, suffix) = body.split_at(end);
    if digits.is_empty() {
        return Err("not a number".into());
    }
    let number = u64::from_str_radix(digits, radix).map_err(|_| TOO_LARGE.to_owned())?;
    Ok((number, suffix))
}

const BAD_SUFFIX: &str =
    "a size ends in k, m, g, t, p or e (powers of 1024), also as in kib, or nothing for bytes";
const TOO_LARGE: &str = "too large";
const US_PER_S: u64 = 1_000_000;
const MAX_FRACTION_DIGITS: usize = 6;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_have_the_units_of_volume_specs() {
        for (text, bytes) in [
            ("4096", 4096),
            ("4k", 4096),
            ("4K", 4096),
            ("4kb", 4096),
            ("4kB", 4096),
            ("4b", 4),
            ("4kib", 4096),
            ("1m", 1 << 20),
            ("1MiB", 1 << 20),
            ("2g", 2 << 30),
            ("1t", 1 << 40),
            ("1pib", 1 << 50),
            ("1.5k", 1536),
            ("0.5GiB", 1 << 29),
            ("0x1000", 4096),
            ("0x1k", 1024),
            ("0x1b", 27),
        ] {
            assert_eq!(parse_int(text), Ok(bytes), "{text}");
            if !text.starts_with("0x") {
                assert_eq!(blockmux_volume::units::parse_size(text), Ok(bytes), "{text}");
            }
        }
    }

    #[test]
    fn text_that_fio_silently_ignores_is_refused() {
        for text in [
            "", "k", "4q", "4.5", "0.3k", "4.k", "4.5x", "4kk", "4 k", "-4", "+4", "4kibb", "4k,8k", "4k-8k",
            "0x", "16384p", "٤k", "4é",
        ] {
            assert!(parse_int(text).is_err(), "{text}");
        }
        assert!(parse_int("4ki").unwrap_err().contains("powers of 1024"));
    }

    #[test]
    fn a_percentage_is_of_the_whole_volume() {
        assert_eq!(parse_size("50%"), Ok(Size::Percent(50)));
        assert_eq!(Size::Percent(50).of(1 << 30), 1 << 29);
        assert_eq!(Size::Percent(100).of(u64::MAX), u64::MAX);
        assert_eq!(parse_size("1m").unwrap().of(5), 1 << 20);
        for text in ["101%", "%", "-1%", "+1%", "1.5%", "5k%"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn times_without_unit_are_seconds() {
        for (text, ms) in [
            ("2", 2000),
            ("2s", 2000),
            ("2sec", 2000),
            ("2S", 2000),
            ("0.5", 500),
            ("1.25s", 1250),
            ("0.000999", 0),
            ("500ms", 500),
            ("500msec", 500),
            ("900000us", 900),
            ("10m", 600_000),
            ("1.5m", 90_000),
            ("1h", 3_600_000),
            ("1d", 86_400_000),
        ] {
            assert_eq!(parse_time_ms(text), Ok(ms), "{text}");
        }
        for text in [
            "",
            "s",
            "1x",
            "1.",
            ".5",
            "1.2.3",
            "1.1234567",
            "-1",
            "99999999999999999999",
            "999999999999999d",
        ] {
            assert!(parse_time_ms(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_a_parser_panic(text in "\\PC{0,12}") {
            let _ = (parse_size(&text), parse_time_ms(&text));
        }

        #[test]
        fn a_formatted_size_is_parsed_back(bytes: u64, percent in 0_u8..=100) {
            for size in [Size::Bytes(bytes), Size::Percent(percent)] {
                prop_assert_eq!(parse_size(&size.to_string()), Ok(size));
            }
        }
    }
}
