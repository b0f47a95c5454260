//! The page of a climb: one file without script or network, for screen and print, light and dark mode.

pub mod anatomy;
mod chart;
pub mod evolution;
mod panels;
mod sections;
pub mod tables;

use maud::{DOCTYPE, Markup, PreEscaped, html};

use climb::Climb;

pub fn page(climb: &Climb) -> String {
    let p = &climb.problem;
    let device = climb.machines.first().map_or("", |m| m.name);
    let markup = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { "FlashCore: the climb" }
                style { (PreEscaped(include_str!("style.css"))) }
            }
            body {
                h1 { "The climb" }
                p.soft {
                    "Attention, batch " (p.batch) ", " (p.heads_q) " heads, " (p.seq_q) " queries, " (p.seq_kv)
                    " keys, head dim " (p.head_dim) ", " (p.dtype) ". "
                    @match &climb.card {
                        Some(card) => { "Measured on " (card) ", beside what the emulator had predicted for the " (device) }
                        None => { "Times on the " (device) " are predicted from the emulator, not measured" }
                    }
                    "; registers come from "
                    (climb.ptxas.as_ref().map_or("an estimate".into(), |v| format!("ptxas {v}"))) "."
                }
                (section("Progress", sections::progress(climb)))
                (section("Time of each version", sections::times(climb)))
                (section("Where the time goes", sections::causes(climb)))
                (section("Under the roofline", sections::roofs(climb)))
                (section("What is wrong with the failed versions", sections::failed(climb)))
                (section("Forecast and outcome", sections::forecasts(climb)))
                (section("Why each is slow", sections::findings(climb)))
                (section("Native CPU kernels, measured here", sections::cpu(climb)))
                (section("The fused kernel, line by line", sections::heat_map(climb)))
            }
        }
    };
    markup.into_string()
}

fn section(title: &str, content: Markup) -> Markup {
    html! { h2 { (title) } (content) }
}
