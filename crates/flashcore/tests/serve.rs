//! The example `serve`, with fewer requests and pages.

#[path = "../examples/serve.rs"]
mod example;

#[test]
fn tokens_equal_those_without_a_cache() {
    let served = example::serve(6, 20).unwrap();
    let [made, equal] = served.tokens;
    assert_eq!(equal, made);
    // Requests run together, and not all at once: pages are given back and used again.
    let [steps, widest] = served.steps;
    assert!((2..6).contains(&widest) && steps < made, "{steps} steps of {widest}, {made} tokens");
}

#[test]
fn a_request_without_room_is_refused() {
    let error = example::serve(2, 1).err().unwrap();
    assert_eq!(error.to_string(), "a cache of 1 pages has no room for the next request");
}
