//! `cargo xtask demo`: text from the small dense checkpoint, by the plain host form and then with INT8 projections bound.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::artifacts::executables;
use crate::{command, paths};

const MODEL: &str = "assets/tiny-dense";
const BIND: &str = "*=linear_proj/w8a16_static";

/// Below this gap between the two best logits, sums in another order may choose the other token.
const NEAR_TIE: f64 = 2e-4;

/// `golden.json`: what transformers generates, greedily, in FP32.
#[derive(Deserialize)]
struct Golden {
    prompts: Vec<Prompt>,
}

#[derive(Deserialize)]
struct Prompt {
    text: String,
    prompt_ids: Vec<u32>,
    greedy_ids: Vec<u32>,
    /// Of each greedy step.
    top2_gap: Vec<f64>,
}

/// What `structures generate --json` prints.
#[derive(Deserialize)]
struct Generation {
    prompt_ids: Vec<u32>,
    new_ids: Vec<u32>,
    text: String,
    timings: Timings,
    ledger: Ledger,
}

#[derive(Deserialize)]
struct Timings {
    tokens_per_s: Option<f64>,
}

#[derive(Deserialize)]
struct Ledger {
    summary: Summary,
}

#[derive(Deserialize)]
struct Summary {
    seats: u64,
    calls: u64,
    served: u64,
    dispatched_by_band: u64,
    fallbacks: u64,
    refused: u64,
}

pub fn run() -> Result<()> {
    // The CPU arms run here, so this neither needs kernels nor installs a compiler for them.
    let mut build = command::cargo(None);
    let built = executables(build.args(["build", "--release", "--package", "structures-cli"]), "bin")?;
    let (_, structures) = built.first().context("structures-cli has no binary")?;
    let golden = paths::root().join(MODEL).join("golden.json");
    let text = fs::read_to_string(&golden).with_context(|| format!("cannot read {}", golden.display()))?;
    let golden: Golden = serde_json::from_str(&text).with_context(|| format!("{MODEL}/golden.json"))?;
    let Some(first) = golden.prompts.first() else { bail!("{MODEL}/golden.json has no prompts") };

    let host = host_form(structures, &golden)?;
    bound_form(structures, first, &host)
}

/// Every golden prompt, each of which must give its golden tokens. Returns the first one's.
fn host_form(structures: &Path, golden: &Golden) -> Result<Vec<u32>> {
    println!("\nThe host form, beside the golden tokens:\n");
    let mut first = Vec::new();
    let mut differing = 0;
    for (i, prompt) in golden.prompts.iter().enumerate() {
        let generation = generate(structures, prompt, &[])?;
        if i == 0 {
            print_text(prompt, &generation);
        }
        let verdict = compare(prompt, &generation);
        differing += usize::from(!verdict.equal);
        println!("  {:<40} {}{}", format!("{:?}", prompt.text), verdict.text, rate(&generation));
        if i == 0 {
            first = generation.new_ids;
        }
    }
    if differing > 0 {
        bail!("{differing} of {} prompts did not give their golden tokens", golden.prompts.len());
    }
    Ok(first)
}

/// One prompt with every projection bound, each call of which must be served or dispatched as planned.
fn bound_form(structures: &Path, prompt: &Prompt, host: &[u32]) -> Result<()> {
    println!("\nWith {BIND}:\n");
    let generation = generate(structures, prompt, &["--bind", BIND])?;
    print_text(prompt, &generation);
    let same = generation.new_ids.iter().zip(host).take_while(|(bound, host)| bound == host).count();
    println!(
        "  {same} of {} tokens as the host's before the first that differs{}",
        host.len(),
        rate(&generation)
    );
    let sum = &generation.ledger.summary;
    println!(
        "  {} seats, {} calls: {} served, {} dispatched by band, {} fallbacks, {} refused",
        sum.seats, sum.calls, sum.served, sum.dispatched_by_band, sum.fallbacks, sum.refused
    );
    if sum.served == 0 || sum.calls != sum.served + sum.dispatched_by_band {
        bail!("the bound form did not serve its calls");
    }
    Ok(())
}

fn generate(structures: &Path, prompt: &Prompt, bind: &[&str]) -> Result<Generation> {
    let mut command = Command::new(structures);
    command.current_dir(paths::root()).args(["generate", "--model", MODEL]).args(bind);
    // The golden tokens go on past the end of a text.
    command.args(["--max-new", &prompt.greedy_ids.len().to_string(), "--ignore-eos", "--json", &prompt.text]);
    let printed = command::output(&mut command)?;
    serde_json::from_str(&printed).with_context(|| format!("structures printed {printed:?}"))
}

struct Verdict {
    equal: bool,
    text: String,
}

/// Holds a generation to the golden one.
fn compare(prompt: &Prompt, generation: &Generation) -> Verdict {
    let differs = |text| Verdict { equal: false, text };
    if generation.prompt_ids != prompt.prompt_ids {
        return differs(format!("prompt is {:?}, golden {:?}", generation.prompt_ids, prompt.prompt_ids));
    }
    let (new, golden) = (&generation.new_ids, &prompt.greedy_ids);
    let step = new.iter().zip(golden).take_while(|(new, golden)| new == golden).count();
    match (new.get(step), golden.get(step)) {
        (None, None) => Verdict { equal: true, text: format!("{step} tokens equal") },
        (Some(new), Some(golden)) => {
            let gap = prompt.top2_gap.get(step).copied().unwrap_or(f64::INFINITY);
            Verdict {
                equal: gap < NEAR_TIE,
                text: format!("token {step} is {new}, golden {golden} (top-2 gap {gap})"),
            }
        }
        _ => differs(format!("{} tokens, golden {}", new.len(), golden.len())),
    }
}

fn print_text(prompt: &Prompt, generation: &Generation) {
    for line in format!("{}{}", prompt.text, generation.text).lines() {
        println!("  | {line}");
    }
    println!();
}

fn rate(generation: &Generation) -> String {
    generation.timings.tokens_per_s.map(|rate| format!(", {rate:.0} tokens/s")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt() -> Prompt {
        serde_json::from_str(
            r#"{"text": "a", "prompt_ids": [7], "greedy_ids": [1, 2, 3], "top2_gap": [1.0, 1e-4, 0.5], "output": {}}"#,
        )
        .unwrap()
    }

    fn verdict(prompt_ids: &str, new_ids: &str) -> Verdict {
        let json = format!(
            r#"{{"prompt_ids": {prompt_ids}, "new_ids": {new_ids}, "text": "b", "timings": {{"tokens_per_s": null}},
                "ledger": {{"summary": {{"seats": 0, "calls": 0, "served": 0, "dispatched_by_band": 0, "fallbacks": 0,
                "refused": 0}}, "seats": []}}}}"#
        );
        compare(&prompt(), &serde_json::from_str(&json).unwrap())
    }

    #[test]
    fn equal_means_every_token() {
        assert!(verdict("[7]", "[1, 2, 3]").equal);
        for (prompt, new) in
            [("[7]", "[1, 2]"), ("[7]", "[1, 2, 3, 4]"), ("[7]", "[1, 2, 4]"), ("[8]", "[1, 2, 3]")]
        {
            assert!(!verdict(prompt, new).equal, "{prompt} {new}");
        }
    }

    #[test]
    fn the_first_difference_is_named_and_a_near_tie_may_differ() {
        let differs = verdict("[7]", "[1, 2, 9]");
        assert_eq!(differs.text, "token 2 is 9, golden 3 (top-2 gap 0.5)");
        let tie = verdict("[7]", "[1, 9, 9]");
        assert!(tie.equal);
        assert_eq!(tie.text, "token 1 is 9, golden 2 (top-2 gap 0.0001)");
    }
}
