//! The HTML pages of a climb and of searches: single files without scripts or network access, for screen and
//! print, in light and dark mode.

pub mod accuracy;
#[cfg(feature = "search")]
pub mod anatomy;
mod chart;
#[cfg(feature = "search")]
pub mod evolution;
mod listing;
mod panels;
mod sections;
pub mod tables;

use maud::{DOCTYPE, Markup, PreEscaped, html};

use climb::Climb;

pub fn page(climb: &Climb) -> String {
    let p = &climb.problem;
    let device = climb.machines.first().map_or("", |m| m.name);
    let parts = [
        ("progress", "Progress", sections::progress(climb)),
        ("times", "Time of each version", sections::times(climb)),
        ("causes", "Where the time goes", sections::causes(climb)),
        ("roofs", "Under the roofline", sections::roofs(climb)),
        ("failed", "What is wrong with the failed versions", sections::failed(climb)),
        ("forecasts", "Forecast and outcome", sections::forecasts(climb)),
        ("findings", "Why each is slow", sections::findings(climb)),
        ("cpu", "Native CPU kernels, measured here", sections::cpu(climb)),
        ("lines", "The fused kernel, line by line", sections::heat_map(climb)),
    ];
    let body = html! {
        body {
            h1 { "The climb" }
            p.soft {
                "Attention, batch " (p.batch) ", " (p.heads_q) " heads, " (p.seq_q) " queries, " (p.seq_kv)
                " keys, head dim " (p.head_dim) ", " (p.dtypes) ". "
                @match &climb.card {
                    Some(card) => { "Measured on " (card) ", beside what the emulator had predicted for the " (device) }
                    None => { "Times on the " (device) " are predicted from the emulator, not measured" }
                }
                "; registers come from "
                (climb.ptxas.as_ref().map_or("an estimate".into(), |v| format!("ptxas {v}"))) "."
            }
            (sections::learnt(climb))
            nav { ol {
                @for (id, title, _) in &parts { li { a href=(format!("#{id}")) { (title) } } }
            } }
            @for (id, title, content) in &parts {
                h2 id=(id) { (title) }
                (content)
            }
        }
    };
    frame("FlashCore: the climb", html! {}, body)
}

/// A page with the style of all pages. `head` follows in its head.
fn frame(title: &str, head: Markup, body: Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) }
                style { (PreEscaped(include_str!("chart.css"))) (PreEscaped(include_str!("style.css"))) }
                (head)
            }
            (body)
        }
    };
    page.into_string()
}
