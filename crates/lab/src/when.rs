//! Points in time as text: RFC 3339 in UTC, to the second.

use std::time::{SystemTime, UNIX_EPOCH};

/// Now, as reports have it: `2026-11-21T12:00:00Z`.
#[must_use]
pub fn now() -> String {
    rfc3339(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()))
}

/// Seconds since 1970 as RFC 3339 in UTC.
#[must_use]
pub fn rfc3339(unix_s: u64) -> String {
    let (year, month, day) = civil(unix_s / DAY_S);
    let (hour, minute, second) = clock(unix_s);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Seconds since 1970 as C's `ctime` has it: `Sat Nov 21 12:00:00 2026`.
#[must_use]
pub fn ctime(unix_s: u64) -> String {
    let days = unix_s / DAY_S;
    let (year, month, day) = civil(days);
    let (hour, minute, second) = clock(unix_s);
    let (weekday, month) = (WEEKDAYS[(days % 7) as usize], &MONTHS[month as usize - 1][..3]);
    format!("{weekday} {month} {day:2} {hour:02}:{minute:02}:{second:02} {year}")
}

/// RFC 3339 in UTC as seconds since 1970; `None` for anything else, or before 1970.
#[must_use]
pub fn unix_s(rfc3339: &str) -> Option<u64> {
    let text = rfc3339.strip_suffix('Z')?;
    let (date, time) = text.split_once('T')?;
    let whole = time.split_once('.').map_or(time, |(whole, _)| whole);
    let [year, month, day] = numbers(date, '-')?;
    let [hour, minute, second] = numbers(whole, ':')?;
    let valid = (1970..=9999).contains(&year) && (1..=12).contains(&month) && (1..=31).contains(&day);
    let seconds = hour * 3600 + minute * 60 + second;
    (valid && hour < 24 && minute < 60 && second <= 60).then(|| days(year, month, day) * DAY_S + seconds)
}

/// RFC 3339 in UTC for people: `21 November 2026, 12:00 UTC`; anything else as it is.
#[must_use]
pub fn spoken(rfc3339: &str) -> String {
    let Some(unix_s) = unix_s(rfc3339) else { return rfc3339.to_owned() };
    let (year, month, day) = civil(unix_s / DAY_S);
    let (hour, minute, _) = clock(unix_s);
    format!("{day} {} {year}, {hour:02}:{minute:02} UTC", MONTHS[month as usize - 1])
}

fn clock(unix_s: u64) -> (u64, u64, u64) {
    let second = unix_s % DAY_S;
    (second / 3600, second / 60 % 60, second % 60)
}

fn numbers(text: &str, separator: char) -> Option<[u64; 3]> {
    let mut parts = text.split(separator).map(|part| {
        let digits = part.len() <= 4 && part.bytes().all(|byte| byte.is_ascii_digit());
        digits.then(|| part.parse().ok())?
    });
    let found = [parts.next()??, parts.next()??, parts.next()??];
    parts.next().is_none().then_some(found)
}

/// Days since 1970 of a date in the Gregorian calendar. Years are counted from March, so that the leap day is the
/// last of its year and every month before it has a fixed place.
fn days(year: u64, month: u64, day: u64) -> u64 {
    let year = if month > 2 { year } else { year - 1 };
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    year * 365 + year / 4 - year / 100 + year / 400 + day_of_year - EPOCH_DAYS
}

fn civil(days_since_1970: u64) -> (u64, u64, u64) {
    let days_left = days_since_1970 + EPOCH_DAYS;
    // The guess is never too late, and at most one year too early.
    let mut year = days_left * 400 / 146_097;
    let start = |year: u64| year * 365 + year / 4 - year / 100 + year / 400;
    if start(year) > days_left {
        year -= 1;
    } else if start(year + 1) <= days_left {
        year += 1;
    }
    let day_of_year = days_left - start(year);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    if month < 10 { (year, month + 3, day) } else { (year + 1, month - 9, day) }
}

const DAY_S: u64 = 86_400;
/// Days from 1 March of year 0 to 1 January 1970.
const EPOCH_DAYS: u64 = 719_468;
/// 1 January 1970 was a Thursday.
const WEEKDAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_moments_are_written_as_others_write_them() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00Z");
        assert_eq!(rfc3339(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(rfc3339(1_795_261_672), "2026-11-21T11:47:52Z");
        assert_eq!(ctime(1_795_261_672), "Sat Nov 21 11:47:52 2026");
        assert_eq!(spoken("2026-11-21T11:47:52Z"), "21 November 2026, 11:47 UTC");
    }

    #[test]
    fn every_day_of_four_centuries_is_read_back() {
        for day in 0..146_097 {
            let written = rfc3339(day * DAY_S + 86_399);
            assert_eq!(unix_s(&written), Some(day * DAY_S + 86_399), "{written}");
        }
    }

    #[test]
    fn what_is_no_time_is_none() {
        for text in
            ["", "Z", "2026-11-21", "2026-13-01T00:00:00Z", "1969-12-31T00:00:00Z", "2026-1-1T25:00:00Z"]
        {
            assert_eq!(unix_s(text), None, "{text}");
        }
        assert_eq!(unix_s("2026-11-21T11:47:52.125Z"), Some(1_795_261_672));
    }
}
