//! Tests how files state the pass of a problem, and with it whether the LSE is returned.

use flashcore_problem::{Pass, Problem};
use serde_json::{from_value, json};

/// A file from before passes existed describes a problem without the LSE.
#[test]
fn files_state_the_pass_where_the_lse_is_wanted() {
    let without = Problem::mission();
    let stored = json!(without);
    assert_eq!((without.pass, stored.get("pass")), (Pass::Forward { lse: false }, None));
    assert_eq!(from_value::<Problem>(stored).unwrap(), without);
    let with = without.with_lse(true);
    let stored = json!(with);
    assert_eq!(stored["pass"], json!({ "forward": { "lse": true } }));
    assert_eq!(from_value::<Problem>(stored).unwrap(), with);
    assert!(with.canonical().pass.lse());
}
