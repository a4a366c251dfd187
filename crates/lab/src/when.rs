//! Times as text: RFC 3339 in UTC, to the second.

use jiff::Timestamp;
use jiff::tz::TimeZone;

/// The current time in the format of reports: `2026-11-21T12:00:00Z`.
#[must_use]
pub fn now() -> String {
    in_utc(Timestamp::now(), RFC_3339)
}

/// Formats seconds since 1970 as RFC 3339 in UTC; a number beyond the calendar as 1970.
#[must_use]
pub fn rfc3339(unix_s: u64) -> String {
    in_utc(timestamp(unix_s), RFC_3339)
}

/// Formats seconds since 1970 as C's `ctime` does: `Sat Nov 21 12:00:00 2026`.
#[must_use]
pub fn ctime(unix_s: u64) -> String {
    in_utc(timestamp(unix_s), "%a %b %e %H:%M:%S %Y")
}

/// Parses RFC 3339 to seconds since 1970; `None` for other text and for times before 1970.
#[must_use]
pub fn unix_s(rfc3339: &str) -> Option<u64> {
    rfc3339.parse::<Timestamp>().ok()?.as_second().try_into().ok()
}

/// Formats RFC 3339 in UTC for people: `21 November 2026, 12:00 UTC`; other text is unchanged.
#[must_use]
pub fn spoken(rfc3339: &str) -> String {
    let parsed: Result<Timestamp, _> = rfc3339.parse();
    parsed.map_or_else(|_| rfc3339.to_owned(), |moment| in_utc(moment, "%-d %B %Y, %H:%M UTC"))
}

fn timestamp(unix_s: u64) -> Timestamp {
    unix_s.try_into().ok().and_then(|second| Timestamp::from_second(second).ok()).unwrap_or_default()
}

fn in_utc(moment: Timestamp, format: &str) -> String {
    moment.to_zoned(TimeZone::UTC).strftime(format).to_string()
}

const RFC_3339: &str = "%Y-%m-%dT%H:%M:%SZ";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_times_are_formatted_correctly() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00Z");
        assert_eq!(rfc3339(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(rfc3339(1_795_261_672), "2026-11-21T11:47:52Z");
        assert_eq!(ctime(1_795_261_672), "Sat Nov 21 11:47:52 2026");
        assert_eq!(spoken("2026-11-21T11:47:52Z"), "21 November 2026, 11:47 UTC");
    }

    #[test]
    fn invalid_times_are_none() {
        for text in
            ["", "Z", "2026-11-21", "2026-13-01T00:00:00Z", "1969-12-31T00:00:00Z", "2026-1-1T25:00:00Z"]
        {
            assert_eq!(unix_s(text), None, "{text}");
        }
        assert_eq!(unix_s("2026-11-21T11:47:52.125Z"), Some(1_795_261_672));
    }
}
