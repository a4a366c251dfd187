//! Parses and formats sizes and durations: `64k`, `1.5GiB`, `100us`.

use std::time::Duration;

/// Why a text is not a size, a duration or a number.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    /// Not a number with a known unit.
    #[error(
        "`{0}` is not a size: write bytes, or a number with k, m, g, t, p or e (powers of 1024), as in 64k or 1g"
    )]
    Size(String),
    /// Not a number with a known unit of time.
    #[error("`{0}` is not a duration: write a number with ns, us, ms, s, m or h, as in 100us or 5ms")]
    Duration(String),
    /// Not a decimal number with at most this many places.
    #[error("`{0}` is not a number with at most {1} decimal places")]
    Decimal(String, u32),
    /// Larger than the largest number that is supported.
    #[error("`{0}` is too large")]
    TooLarge(String),
    /// A fraction of the smallest unit, such as `0.3` bytes.
    #[error("`{0}` is not a whole number of {1}: leave out the fraction or take a smaller unit")]
    NotWhole(String, &'static str),
}

/// Parses a size in bytes as fio does: `4096`, `4k`, `1.5g`, `64KiB`, `1MB`; in upper or lower
/// case, and every unit a power of 1024.
///
/// # Errors
/// If the text is not a size, or not a whole number of bytes.
pub fn parse_size(text: &str) -> Result<u64, UnitError> {
    let malformed = || UnitError::Size(text.to_owned());
    let (number, unit) = split(text).ok_or_else(malformed)?;
    scaled(number, size_unit(unit).ok_or_else(malformed)?, text, "bytes")
}

/// The factor of a size's unit: of no unit or `b`, `k`, `kb`, `KiB` and so on. All parsers of sizes
/// use it, so that `4kib` is the same everywhere.
#[must_use]
pub fn size_unit(unit: &str) -> Option<u64> {
    let unit = unit.to_ascii_lowercase();
    let letter = match unit.strip_suffix("ib").or_else(|| unit.strip_suffix('b')).unwrap_or(&unit) {
        "" if unit == "ib" => return None,
        "" => return Some(1),
        letter => letter,
    };
    let power = SIZE_UNITS.iter().position(|&known| known == letter)?;
    Some(1 << (10 * (power + 1)))
}

/// Parses a duration: `100us`, `1.5ms`, `2s`, `5m`; a number without unit only if it is 0.
///
/// # Errors
/// If the text is not a duration, or not a whole number of nanoseconds.
pub fn parse_duration(text: &str) -> Result<Duration, UnitError> {
    let malformed = || UnitError::Duration(text.to_owned());
    let (number, unit) = split(text).ok_or_else(malformed)?;
    let unit_ns = match unit {
        "" if number.bytes().all(|digit| digit == b'0') => 1,
        "µs" => 1_000,
        _ => DURATION_UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(malformed)?.1,
    };
    scaled(number, unit_ns, text, "nanoseconds").map(Duration::from_nanos)
}

/// Parses a decimal number and multiplies it by 10 to the power of `places`: `parse_decimal("0.25",
/// 3)` is 250.
///
/// # Errors
/// If the text is not a number or has more places.
pub fn parse_decimal(text: &str, places: u32) -> Result<u64, UnitError> {
    let malformed = || UnitError::Decimal(text.to_owned(), places);
    match split(text).ok_or_else(malformed)? {
        (number, "") => scaled(number, 10u64.checked_pow(places).ok_or_else(malformed)?, text, "")
            .map_err(|error| if matches!(error, UnitError::NotWhole(..)) { malformed() } else { error }),
        _ => Err(malformed()),
    }
}

/// Formats a size exactly, in the shortest form that [`parse_size`] reads: `64k`, `1g`, `1000`.
#[must_use]
pub fn format_size(bytes: u64) -> String {
    let power = (bytes.trailing_zeros() as usize / 10).min(SIZE_UNITS.len());
    match power {
        _ if bytes == 0 => "0".to_owned(),
        0 => bytes.to_string(),
        _ => format!("{}{}", bytes >> (10 * power), SIZE_UNITS[power - 1]),
    }
}

/// Formats a size for people, with about three digits: `64 KiB`, `1.50 GiB`, `1000 B`.
#[must_use]
pub fn human_size(bytes: u64) -> String {
    let mut power = (bytes.checked_ilog2().unwrap_or(0) / 10) as usize;
    let mut value = bytes as f64 / (1u64 << (10 * power)) as f64;
    // A value that would be rounded up to 1024 is formatted in the next unit.
    if value >= 1023.5 && power < SIZE_UNITS.len() {
        (value, power) = (value / 1024.0, power + 1);
    }
    if power == 0 {
        return format!("{bytes} B");
    }
    let decimals = match value {
        _ if value.fract() == 0.0 => 0,
        ..9.995 => 2,
        ..99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$} {}iB", SIZE_UNITS[power - 1].to_ascii_uppercase())
}

/// Formats a duration exactly, in the shortest form that [`parse_duration`] reads: `100us`, `90s`,
/// `0s`.
#[must_use]
pub fn format_duration(duration: Duration) -> String {
    let ns = duration.as_nanos();
    if ns == 0 {
        return "0s".to_owned();
    }
    let fits = |(_, unit_ns): &&(&str, u64)| ns.is_multiple_of((*unit_ns).into());
    let (name, unit_ns) = DURATION_UNITS.iter().rev().find(fits).unwrap_or(&DURATION_UNITS[0]);
    format!("{}{name}", ns / u128::from(*unit_ns))
}

/// Splits a number, digits with at most one point, from the text after it.
fn split(text: &str) -> Option<(&str, &str)> {
    let end = text.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let is_digits = |part: &str| !part.is_empty() && !part.contains('.');
    let is_number = match number.split_once('.') {
        Some((whole, fraction)) => is_digits(whole) && is_digits(fraction),
        None => is_digits(number),
    };
    is_number.then_some((number, unit))
}

/// Multiplies `number` by `unit`, exactly.
fn scaled(number: &str, unit: u64, text: &str, what: &'static str) -> Result<u64, UnitError> {
    let too_large = || UnitError::TooLarge(text.to_owned());
    let not_whole = || UnitError::NotWhole(text.to_owned(), what);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    let fraction = fraction.trim_end_matches('0');
    // The limit keeps the product below within 128 bits.
    let scale =
        10u128.checked_pow(fraction.len() as u32).filter(|_| fraction.len() <= 19).ok_or_else(not_whole)?;
    let parts: u128 = if fraction.is_empty() { 0 } else { fraction.parse().map_err(|_| too_large())? };
    let parts = parts * u128::from(unit);
    if !parts.is_multiple_of(scale) {
        return Err(not_whole());
    }
    let sum = u128::from(whole) * u128::from(unit) + parts / scale;
    u64::try_from(sum).map_err(|_| too_large())
}

/// Units of sizes: `k` is 1024 bytes, and each other unit is 1024 times the one before.
const SIZE_UNITS: [&str; 6] = ["k", "m", "g", "t", "p", "e"];
/// Units of time, in nanoseconds.
const DURATION_UNITS: [(&str, u64); 6] = [
    ("ns", 1),
    ("us", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_are_parsed_as_in_fio() {
        let sizes = [
            ("0", 0),
            ("4096", 4096),
            ("512b", 512),
            ("4k", 4096),
            ("4K", 4096),
            ("64KiB", 65536),
            ("64KB", 65536),
            ("1m", 1 << 20),
            ("1.5g", 3 << 29),
            ("1.50G", 3 << 29),
            ("2T", 2 << 40),
            ("1p", 1 << 50),
            ("15e", 15 << 60),
            ("18446744073709551615", u64::MAX),
        ];
        for (text, bytes) in sizes {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn an_invalid_size_is_named_in_the_error() {
        for text in ["", "k", "1x", "-1", "1 k", "1.k", ".5k", "1.2.3k", "1kk", "1ib", "0x10", "1kib2"] {
            assert_eq!(parse_size(text), Err(UnitError::Size(text.to_owned())));
        }
        assert_eq!(parse_size("16e"), Err(UnitError::TooLarge("16e".into())));
        assert_eq!(
            parse_size("99999999999999999999"),
            Err(UnitError::TooLarge("99999999999999999999".into()))
        );
        assert_eq!(parse_size("0.3k").unwrap_err().to_string().lines().count(), 1);
        assert!(matches!(parse_size("0.3k"), Err(UnitError::NotWhole(..))));
        assert!(matches!(parse_size(&format!("0.{}1k", "0".repeat(99))), Err(UnitError::NotWhole(..))));
    }

    #[test]
    fn durations_have_units() {
        let durations = [("0", 0), ("100ns", 100), ("100us", 100_000), ("7µs", 7_000), ("1.5ms", 1_500_000)];
        for (text, ns) in durations {
            assert_eq!(parse_duration(text), Ok(Duration::from_nanos(ns)), "{text}");
        }
        assert_eq!(parse_duration("2m"), Ok(Duration::from_secs(120)));
        for text in ["5", "ms", "5 ms", "5MS", "", "1d"] {
            assert_eq!(parse_duration(text), Err(UnitError::Duration(text.to_owned())));
        }
        assert!(matches!(parse_duration("0.5ns"), Err(UnitError::NotWhole(..))));
        assert!(matches!(parse_duration("9999999999h"), Err(UnitError::TooLarge(_))));
    }

    #[test]
    fn decimals_are_scaled_to_integers() {
        assert_eq!((parse_decimal("0.25", 3), parse_decimal("1", 6)), (Ok(250), Ok(1_000_000)));
        for text in ["0.0001", "x", "1%", ""] {
            assert_eq!(parse_decimal(text, 3), Err(UnitError::Decimal(text.to_owned(), 3)));
        }
    }

    #[test]
    fn sizes_for_people_have_about_three_digits() {
        let sizes = [
            (0, "0 B"),
            (1000, "1000 B"),
            (1023, "1023 B"),
            (65536, "64 KiB"),
            (3 << 29, "1.50 GiB"),
            ((1 << 30) - 1, "1.00 GiB"),
            (1 << 30, "1 GiB"),
            (123_456_789, "118 MiB"),
            (u64::MAX, "16 EiB"),
        ];
        for (bytes, text) in sizes {
            assert_eq!(human_size(bytes), text, "{bytes}");
        }
    }

    #[test]
    fn durations_are_written_exactly() {
        let written = [(0, "0s"), (1_500, "1500ns"), (90_000_000_000, "90s"), (5_000_000, "5ms")];
        for (ns, text) in written {
            assert_eq!(format_duration(Duration::from_nanos(ns)), text);
        }
    }

    proptest! {
        #[test]
        fn formatted_units_are_parsed_back(bytes: u64, shift in 0u32..64, ns: u64) {
            let bytes = bytes >> shift << shift;
            prop_assert_eq!(parse_size(&format_size(bytes)), Ok(bytes));
            let duration = Duration::from_nanos(ns);
            prop_assert_eq!(parse_duration(&format_duration(duration)), Ok(duration));
        }

        #[test]
        fn no_text_makes_a_parser_panic(text in "[0-9.kmgtpeibsunh ]{0,30}") {
            let _ = (parse_size(&text), parse_duration(&text), parse_decimal(&text, 6));
        }
    }
}
