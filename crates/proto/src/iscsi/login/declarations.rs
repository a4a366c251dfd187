//! Keys that an initiator declares once per login (RFC 7143 §13).

/// Declared values, by key.
#[derive(Default)]
pub(super) struct LoginDeclarations([Option<Box<str>>; KEYS.len()]);

impl LoginDeclarations {
    /// Records a key; returns whether it contradicts an earlier value, which ends the login (RFC
    /// 7143 §6.3). Repeating the same value is accepted, because libiscsi does so in its next
    /// stage.
    pub(super) fn is_contradicted(&mut self, key: &str, value: &str) -> bool {
        let declared = KEYS.iter().zip(&mut self.0).find(|(known, _)| **known == key);
        declared.is_some_and(|(_, declared)| **declared.get_or_insert_with(|| value.into()) != *value)
    }
}

const KEYS: [&str; 4] = ["InitiatorName", "InitiatorAlias", "TargetName", "SessionType"];
