//! Keys of an iSCSI login that foreign configs set, as keys of an `[[iscsi_target]]`.

use super::model::ImportedTarget;
use toml::Value;

/// How a value is written.
enum Form {
    Number,
    Switch,
    Digest,
}

/// Sets a login key of RFC 7143, in any case. Returns `false` if our config has no such key, or not
/// this value.
pub(super) fn set(target: &mut ImportedTarget, name: &str, value: &str) -> bool {
    let known = KEYS.iter().find(|(key, ..)| key.eq_ignore_ascii_case(name));
    let Some((key, form, least, most)) = known else { return false };
    let value = value.trim();
    let written = match form {
        Form::Number => match value.parse::<i64>() {
            Ok(number) if (*least..=*most).contains(&number) => Value::Integer(number),
            _ => return false,
        },
        Form::Switch => match value.to_ascii_lowercase().as_str() {
            "yes" | "1" | "on" | "true" => Value::Boolean(true),
            "no" | "0" | "off" | "false" => Value::Boolean(false),
            _ => return false,
        },
        Form::Digest => {
            let has = |digest: &str| value.split(',').any(|own| own.trim().eq_ignore_ascii_case(digest));
            match (has("None"), has("CRC32C")) {
                // The initiator chooses, as without the key.
                (true, true) => return true,
                (true, false) => "None".into(),
                (false, true) => "CRC32C".into(),
                (false, false) => return false,
            }
        }
    };
    target.parameters.retain(|(other, _)| other != key);
    target.parameters.push((key, written));
    true
}

/// Makes the bursts fit together: a first burst may not be longer than a burst.
pub(super) fn settle(target: &mut ImportedTarget) {
    let number = |key: &str| {
        let found = target.parameters.iter().find(|(own, _)| *own == key);
        found.and_then(|(_, value)| value.as_integer())
    };
    let burst = number("MaxBurstLength").unwrap_or(DEFAULT_BURST);
    if number("FirstBurstLength").unwrap_or(DEFAULT_FIRST_BURST) > burst {
        target.parameters.retain(|(key, _)| *key != "FirstBurstLength");
        target.parameters.push(("FirstBurstLength", burst.into()));
    }
}

/// Keys with the least and the greatest value that our config accepts.
const KEYS: [(&str, Form, i64, i64); 12] = [
    ("HeaderDigest", Form::Digest, 0, 0),
    ("DataDigest", Form::Digest, 0, 0),
    ("InitialR2T", Form::Switch, 0, 0),
    ("ImmediateData", Form::Switch, 0, 0),
    ("MaxRecvDataSegmentLength", Form::Number, 512, (1 << 24) - 1),
    ("MaxBurstLength", Form::Number, 512, (1 << 24) - 1),
    ("FirstBurstLength", Form::Number, 512, (1 << 24) - 1),
    ("MaxOutstandingR2T", Form::Number, 1, 65_535),
    ("MaxConnections", Form::Number, 1, 64),
    ("ErrorRecoveryLevel", Form::Number, 0, 2),
    ("DefaultTime2Wait", Form::Number, 0, 3600),
    ("DefaultTime2Retain", Form::Number, 0, 3600),
];
/// Our defaults, in bytes.
const DEFAULT_BURST: i64 = 1 << 20;
const DEFAULT_FIRST_BURST: i64 = 256 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_a_config_refuses_are_not_set() {
        let mut target = ImportedTarget::default();
        for (name, value) in
            [("MaxBurstLength", "100"), ("ifmarker", "No"), ("InitialR2T", "perhaps"), ("HeaderDigest", "x")]
        {
            assert!(!set(&mut target, name, value), "{name}");
        }
        assert!(target.parameters.is_empty());
    }

    #[test]
    fn a_first_burst_is_no_longer_than_a_burst() {
        let mut target = ImportedTarget::default();
        assert!(set(&mut target, "maxburstlength", "65536") && set(&mut target, "InitialR2T", "Yes"));
        settle(&mut target);
        let written: Vec<_> =
            target.parameters.iter().map(|(key, value)| format!("{key} = {value}")).collect();
        assert_eq!(written, ["MaxBurstLength = 65536", "InitialR2T = true", "FirstBurstLength = 65536"]);
    }
}
