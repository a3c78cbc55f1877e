//! The binary as a user meets it: what it prints, and one clear line and exit code 2 for every bad input.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

fn assets() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets")
}

fn tiny_dense() -> String {
    assets().join("tiny-dense").display().to_string()
}

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_structures")).args(args).output().unwrap()
}

fn stdout(args: &[&str]) -> String {
    let output = run(args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {stderr}");
    String::from_utf8(output.stdout).unwrap()
}

fn answer(args: &[&str]) -> Value {
    serde_json::from_str(&stdout(args)).unwrap()
}

/// The one line that a bad input gets.
fn error(args: &[&str]) -> String {
    let output = run(args);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
    assert!(output.stdout.is_empty(), "{args:?} printed before it failed");
    assert_eq!(stderr.lines().count(), 1, "{args:?}: {stderr}");
    stderr.trim().strip_prefix("error: ").unwrap_or_else(|| panic!("{stderr}")).to_string()
}

/// `structures generate` on a model folder, which must fail.
fn generate_error(model: &Path, extra: &[&str]) -> String {
    let model = model.display().to_string();
    error(&[&["generate", "--model", &model, "--max-new", "1", "--prompt-tokens", "1,2"], extra].concat())
}

/// A copy of tiny-dense in which files can be changed: the others are links.
fn copy_of_tiny_dense() -> TempDir {
    let folder = TempDir::new().unwrap();
    for entry in fs::read_dir(assets().join("tiny-dense")).unwrap() {
        let path = entry.unwrap().path();
        std::os::unix::fs::symlink(
            fs::canonicalize(&path).unwrap(),
            folder.path().join(path.file_name().unwrap()),
        )
        .unwrap();
    }
    folder
}

/// Replaces a linked file by a changed copy.
fn change(folder: &TempDir, name: &str, change: impl FnOnce(Vec<u8>) -> Vec<u8>) {
    let path = folder.path().join(name);
    let bytes = fs::read(&path).unwrap();
    fs::remove_file(&path).unwrap();
    fs::write(&path, change(bytes)).unwrap();
}

/// Changes the JSON header of a shard, padding it with spaces to its old length.
fn change_header(folder: &TempDir, name: &str, from: &str, to: &str) {
    change(folder, name, |bytes| {
        let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header = std::str::from_utf8(&bytes[8..8 + len]).unwrap();
        assert!(header.contains(from), "{header}");
        let mut changed = header.replacen(from, to, 1).trim_end().to_string();
        while changed.len() < len {
            changed.push(' ');
        }
        assert_eq!(changed.len(), len);
        [&bytes[..8], changed.as_bytes(), &bytes[8 + len..]].concat()
    });
}

#[test]
fn list_names_what_is_linked_and_what_was_built() {
    let table = stdout(&["list"]);
    assert!(table.contains("linear_proj"), "{table}");
    assert!(table.contains("w8a16_static"), "{table}");
    let rows = answer(&["list", "--json"]);
    let ids: Vec<&str> = rows.as_array().unwrap().iter().map(|row| row["id"].as_str().unwrap()).collect();
    let expected = [
        "decode_loop/fp8_kv",
        "decode_loop/whole_step",
        "linear_proj/nvfp4_balance",
        "linear_proj/nvfp4_dynamic",
        "linear_proj/w8a16_static",
    ];
    assert_eq!(ids, expected);
    assert_eq!((&rows[2]["calibrated"], &rows[3]["calibrated"]), (&json!(true), &json!(false)));
    assert_eq!(rows[4]["envelope"]["band"]["max"], 16);
}

#[test]
fn explain_gives_every_seat_a_reason() {
    let model = tiny_dense();
    let args = ["explain", "--model", &model, "--bind", "*=w8a16_static", "--bind", "lm_head=host", "--json"];
    let plan = answer(&args);
    let seats = plan["seats"].as_array().unwrap();
    let of = |path: &str| seats.iter().find(|seat| seat["path"] == path).unwrap()["outcome"].clone();
    assert_eq!(of("lm_head")["outcome"], "kept");
    assert_eq!(of("model.layers.0.mlp.up_proj")["outcome"], "bound");
    assert_eq!(of("model.layers.0.mlp.up_proj")["receipt"]["dims"], serde_json::json!([512, 256]));
    assert_eq!(plan["summary"]["bound"].as_u64().unwrap() + 1, seats.len() as u64);

    let table = stdout(&args[..args.len() - 1]);
    assert!(table.contains("kept: a rule keeps it at the host"), "{table}");
    assert!(table.contains("other M dispatched to the host"), "{table}");

    // The receipt says which scales NVFP4 has.
    for (scales, format) in [("two-level", "NVFP4 two-level"), ("single-level", "NVFP4 single-level")] {
        let plan = answer(&[
            "explain",
            "--model",
            &model,
            "--bind",
            "lm_head=nvfp4_dynamic",
            "--nvfp4-scales",
            scales,
            "--json",
        ]);
        let seats = plan["seats"].as_array().unwrap();
        let head = seats.iter().find(|seat| seat["path"] == "lm_head").unwrap();
        assert_eq!(head["outcome"]["receipt"]["formats"]["weights"], format);
    }
}

#[test]
fn explain_lists_expert_banks() {
    let model = assets().join("tiny-moe").display().to_string();
    let table = stdout(&["explain", "--model", &model]);
    assert!(table.contains("kept: no implementation of moe_experts is linked"), "{table}");
    assert!(table.contains("16 x 64 x 256"), "{table}");
}

#[test]
fn generate_prints_the_golden_text() {
    let golden: Value =
        serde_json::from_slice(&fs::read(assets().join("tiny-dense/golden.json")).unwrap()).unwrap();
    let prompt = &golden["prompts"][0];
    let model = tiny_dense();
    let text = prompt["text"].as_str().unwrap();
    let generation = answer(&["generate", "--model", &model, "--max-new", "96", "--json", text]);
    assert_eq!(generation["prompt_ids"], prompt["prompt_ids"]);
    assert_eq!(generation["new_ids"], prompt["greedy_ids"]);

    // The same as it streams, with the prompt in front.
    let streamed = stdout(&["generate", "--model", &model, "--max-new", "96", text]);
    assert!(streamed.starts_with(prompt["output"].as_str().unwrap()), "{streamed}");
    assert!(streamed.contains("tokens/s"), "{streamed}");

    let ids: Vec<String> = prompt["prompt_ids"].as_array().unwrap().iter().map(ToString::to_string).collect();
    let from_ids = answer(&[
        "generate",
        "--model",
        &model,
        "--max-new",
        "5",
        "--json",
        "--prompt-tokens",
        &ids.join(","),
    ]);
    assert_eq!(from_ids["new_ids"].as_array().unwrap()[..], generation["new_ids"].as_array().unwrap()[..5]);
}

#[test]
fn generate_draws_by_a_seed() {
    let model = tiny_dense();
    let draw = |extra: &[&str]| {
        let args = ["generate", "--model", &model, "--max-new", "24", "--json", "A trait"];
        answer(&[&args[..], extra].concat())
    };
    let greedy = draw(&[]);
    assert_eq!(draw(&["--temperature", "0"])["new_ids"], greedy["new_ids"]);
    assert_eq!(draw(&["--top-k", "1"])["new_ids"], greedy["new_ids"]);
    let seven = draw(&["--temperature", "1.5", "--top-k", "100", "--top-p", "0.95", "--seed", "7"]);
    assert_eq!(
        draw(&["--temperature", "1.5", "--top-k", "100", "--top-p", "0.95", "--seed", "7"])["new_ids"],
        seven["new_ids"]
    );
    assert_ne!(draw(&["--temperature", "1.5", "--seed", "8"])["new_ids"], seven["new_ids"]);
    let line = error(&["generate", "--model", &model, "--top-p", "1.5", "A trait"]);
    assert_eq!(line, "top_p is 1.5; it must be above 0 and at most 1");
}

#[test]
fn generate_keeps_keys_and_values_where_it_is_told() {
    let model = tiny_dense();
    let with = |extra: &[&str]| {
        let args = ["generate", "--model", &model, "--max-new", "8", "--json", "A trait object is"];
        answer(&[&args[..], extra].concat())
    };
    let (host, fp8) = (with(&[]), with(&["--kv", "fp8_kv", "--window", "64"]));
    assert_eq!((&host["finish"], &host["device"]), (&json!("length"), &json!("cpu")));
    let bytes = |generation: &Value| generation["kv_bytes"].as_u64().unwrap();
    assert!(bytes(&host) > 0 && bytes(&fp8) > 0);
    assert_eq!(fp8["new_ids"].as_array().unwrap().len(), 8);

    let error = |extra: &[&str]| generate_error(&assets().join("tiny-dense"), extra);
    assert_eq!(error(&["--window", "1"]), "2 positions are needed, the window holds 1");
    assert!(error(&["--kv", "nope"]).starts_with("unknown variant `nope` of decode_loop"));
    assert!(error(&["--kv", "whole_step"]).contains("it must be a store of keys and values"));
}

/// A text that Ctrl-C ends is printed as far as it came.
#[test]
#[cfg(unix)]
fn ctrl_c_ends_the_text() {
    use std::io::{BufRead, BufReader, Read};
    use std::process::Stdio;

    let model = tiny_dense();
    let mut child = Command::new(env!("CARGO_BIN_EXE_structures"))
        .args(["generate", "--model", &model, "--max-new", "4000", "--ignore-eos", "A trait object is"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut printed = String::new();
    out.read_line(&mut printed).unwrap();
    assert!(printed.starts_with("A trait object is"), "{printed}");
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    out.read_to_string(&mut printed).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(printed.contains(" new tokens") && !printed.contains("4000 new tokens"), "{printed}");
}

#[test]
fn generate_counts_its_bound_calls() {
    let model = tiny_dense();
    let bind = "*=linear_proj/w8a16_static";
    let args = ["generate", "--model", &model, "--bind", bind, "--max-new", "4", "--json", "A trait"];
    let ledger = &answer(&args)["ledger"];
    let sum = |key: &str| ledger["summary"][key].as_u64().unwrap();
    assert!(sum("served") > 0);
    assert_eq!(sum("calls"), sum("served") + sum("dispatched_by_band") + sum("fallbacks") + sum("refused"));
    let seats = ledger["seats"].as_array().unwrap();
    let calls: u64 = seats.iter().map(|seat| seat[2]["calls"].as_u64().unwrap()).sum();
    assert_eq!(calls, sum("calls"));
}

#[test]
fn eval_measures_both_forms() {
    let model = tiny_dense();
    let tokens = assets().join("valid_tokens.u16").display().to_string();
    let args = [
        "eval",
        "--model",
        &model,
        "--tokens",
        &tokens,
        "--limit",
        "512",
        "--bind",
        "*=w8a16_static",
        "--json",
    ];
    let eval = answer(&args);
    assert_eq!(eval["host"]["tokens"], 512);
    let ratio = eval["bound"]["ratio"].as_f64().unwrap();
    assert!(ratio != 1.0 && (ratio - 1.0).abs() < 0.02, "{ratio}");
}

/// A small calibration of tiny-dense.
fn calibrate(folder: &TempDir, extra: &[&str]) -> (PathBuf, String) {
    let out = folder.path().join("calibration.json");
    let tokens = assets().join("valid_tokens.u16").display().to_string();
    let (model, file) = (tiny_dense(), out.display().to_string());
    let args =
        ["calibrate", "--model", &model, "--tokens", &tokens, "--window", "32", "--limit", "64", &file];
    (out, stdout(&[&args[..], extra].concat()))
}

#[test]
fn calibrate_writes_what_a_balance_needs() {
    let folder = TempDir::new().unwrap();
    let (file, said) = calibrate(&folder, &["--skip", "1000", "--percentile", "0.5"]);
    assert!(said.starts_with("32 seats over 2 windows of 32 tokens, percentile 0.5: "), "{said}");
    let calibration: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(calibration["format"], 1);
    assert_eq!((&calibration["samples"], &calibration["window"]), (&json!(2), &json!(32)));
    assert_eq!(calibration["percentile"], 0.5);
    assert_eq!(
        (&calibration["model"]["hidden_size"], &calibration["model"]["vocab_size"]),
        (&json!(256), &json!(2048))
    );
    let head = &calibration["seats"]["lm_head"];
    assert_eq!((&head["k"], head["amax"].as_array().unwrap().len()), (&json!(256), 256));

    let (model, path) = (tiny_dense(), file.display().to_string());
    let args = ["explain", "--model", &model, "--bind", "*=nvfp4_balance", "--calibration", &path, "--json"];
    let plan = answer(&args);
    assert_eq!(plan["summary"]["bound"], 32);
    assert_eq!(
        plan["seats"][0]["outcome"]["receipt"]["formats"]["activations"],
        "NVFP4 two-level per row, balanced"
    );
}

#[test]
fn bad_calibrations_are_refused() {
    let bind = |extra: &[&str]| {
        generate_error(&assets().join("tiny-dense"), &[&["--bind", "lm_head=nvfp4_balance"], extra].concat())
    };
    let line = bind(&[]);
    assert!(line.starts_with("lm_head: linear_proj/nvfp4_balance needs"), "{line}");
    assert!(line.contains("no calibration was given; `structures calibrate` records it"), "{line}");
    assert!(bind(&["--calibration", "no/such.json"]).starts_with("no/such.json: No such file"));

    let folder = TempDir::new().unwrap();
    let (file, _) = calibrate(&folder, &[]);
    let path = file.display().to_string();
    let whole = fs::read_to_string(&file).unwrap();
    assert_eq!(bind_status(&path), Some(0));
    let changed = |text: String| {
        fs::write(&file, text).unwrap();
        bind(&["--calibration", &path])
    };
    for cut in [0, 1, 100, whole.len() / 2, whole.len() - 1] {
        let line = changed(whole[..cut].to_string());
        assert!(line.starts_with(&path) && line.contains("EOF while parsing"), "cut to {cut}: {line}");
    }
    let edited = |change: &dyn Fn(&mut Value)| {
        let mut value: Value = serde_json::from_str(&whole).unwrap();
        change(&mut value);
        changed(value.to_string())
    };
    let head = |value: &mut Value, change: &dyn Fn(&mut Vec<Value>)| {
        change(value["seats"]["lm_head"]["amax"].as_array_mut().unwrap());
    };
    let line = edited(&|value| value["format"] = json!(2));
    assert_eq!(line, format!("{path}: format 2, this program reads 1"));
    let line = edited(&|value| {
        value["seats"].as_object_mut().unwrap().remove("lm_head");
    });
    assert!(
        line.contains("lm_head") && line.contains("the calibration that was given has no such seat"),
        "{line}"
    );
    let line = edited(&|value| {
        head(value, &|amax| {
            amax.pop();
        });
    });
    assert_eq!(line, format!("{path}: lm_head: amax: shape [255], expected [256]"));
    // Consistent with itself, and not with the seat.
    let line = edited(&|value| {
        head(value, &|amax| amax.truncate(16));
        value["seats"]["lm_head"]["k"] = json!(16);
    });
    assert_eq!(line, "lm_head: amax of input channels: shape [16], expected [256]");
    let line = edited(&|value| head(value, &|amax| amax[3] = json!(-0.5)));
    assert_eq!(
        line,
        format!("{path}: lm_head: amax: element 3 is -0.5; it must be a magnitude, not negative")
    );
    let line = edited(&|value| head(value, &|amax| amax[3] = json!(1e300)));
    assert_eq!(line, format!("{path}: lm_head: amax: element 3 is inf; it must be finite"));
    let line = changed(whole.replacen("\"amax\":[", "\"amax\":[NaN,", 1));
    assert!(line.starts_with(&path) && line.contains("expected"), "{line}");
    let line = edited(&|value| value["percentile"] = json!(1.5));
    assert_eq!(line, "percentile of a calibration is 1.5; it must be in 0..=1");
    let line = edited(&|value| value["model"]["hidden_size"] = json!(512));
    assert_eq!(line, "calibration: hidden_size is 512; it must be that of the model, 256");
    let line = edited(&|value| value["model"]["num_experts"] = json!(4));
    assert_eq!(line, "calibration: num_experts is 4; it must be that of the model, absent");

    let tokens = assets().join("valid_tokens.u16").display().to_string();
    let model = tiny_dense();
    let args = ["calibrate", "--model", &model, "--tokens", &tokens, "--limit", "256", "--percentile", "-1"];
    let line = error(&[&args[..7], &["--percentile=-1", &path]].concat());
    assert_eq!(line, "percentile of a calibration is -1; it must be in 0..=1");
}

/// The exit code of one token with a balanced head.
fn bind_status(calibration: &str) -> Option<i32> {
    let model = tiny_dense();
    let args = ["generate", "--model", &model, "--max-new", "1", "--prompt-tokens", "1,2"];
    run(&[&args[..], &["--bind", "lm_head=nvfp4_balance", "--calibration", calibration]].concat())
        .status
        .code()
}

#[test]
fn bad_folders_are_named() {
    let folder = TempDir::new().unwrap();
    let missing = folder.path().join("nope");
    let line = generate_error(&missing, &[]);
    assert!(line.ends_with("nope: no such folder"), "{line}");
    let line = generate_error(folder.path(), &[]);
    assert!(line.contains("config.json"), "{line}");
}

#[test]
fn bad_shards_are_named() {
    const SHARD: &str = "model-00002-of-00003.safetensors";
    let folder = copy_of_tiny_dense();
    fs::remove_file(folder.path().join(SHARD)).unwrap();
    let line = generate_error(folder.path(), &[]);
    assert!(line.contains(SHARD), "{line}");

    for cut in [4, 100, 4_000_000] {
        let folder = copy_of_tiny_dense();
        change(&folder, SHARD, |bytes| bytes[..cut].to_vec());
        let line = generate_error(folder.path(), &[]);
        assert!(line.contains(SHARD), "cut to {cut}: {line}");
    }

    let folder = copy_of_tiny_dense();
    change_header(&folder, SHARD, r#""dtype":"BF16""#, r#""dtype":"XF16""#);
    let line = generate_error(folder.path(), &[]);
    assert!(line.contains(SHARD) && line.contains("XF16"), "{line}");

    let folder = copy_of_tiny_dense();
    change_header(&folder, SHARD, r#""shape":[512,256]"#, r#""shape":[256,512]"#);
    let line = generate_error(folder.path(), &[]);
    assert!(line.contains("[256, 512]") && line.contains("[512, 256]"), "{line}");
}

#[test]
fn an_index_that_names_an_absent_tensor_is_refused() {
    let folder = copy_of_tiny_dense();
    change(&folder, "model.safetensors.index.json", |bytes| {
        let index = String::from_utf8(bytes).unwrap();
        index.replace("\"model.norm.weight\"", "\"model.morn.weight\"").into_bytes()
    });
    let line = generate_error(folder.path(), &[]);
    assert!(line.contains("model.morn.weight") || line.contains("model.norm.weight"), "{line}");
}

#[test]
fn a_weight_that_is_not_finite_is_refused() {
    for (bits, name) in [(0x7fc0u16, "NaN"), (0xff80, "-inf")] {
        let folder = copy_of_tiny_dense();
        change(&folder, "model-00003-of-00003.safetensors", |mut bytes| {
            let at = bytes.len() - 100;
            bytes[at..at + 2].copy_from_slice(&bits.to_le_bytes());
            bytes
        });
        let line = generate_error(folder.path(), &[]);
        assert!(line.contains("lm_head") && line.contains(name), "{line}");
    }
}

#[test]
fn bad_rules_are_refused() {
    let model = assets().join("tiny-dense");
    let bind = |rule: &str| generate_error(&model, &["--bind", rule]);
    let line = bind("*=nope");
    assert_eq!(
        line,
        "unknown variant `nope` of linear_proj; linked here: nvfp4_balance, nvfp4_dynamic, w8a16_static"
    );
    let line = bind("*=nope/w8a16_static");
    assert!(line.starts_with("unknown structure `nope`; linked here: decode_loop, linear_proj"), "{line}");
    let line = bind("model.layers.9.*=w8a16_static");
    assert!(line.starts_with("pattern `model.layers.9.*` matches none of the model's"), "{line}");
    assert!(bind("w8a16_static").contains("write PATTERN=VARIANT"));
}

#[test]
fn a_gpu_that_is_not_there_is_refused() {
    let built = !answer(&["list", "--json"])[0]["kernels"]["built"].as_array().unwrap().is_empty();
    let model = assets().join("tiny-dense");
    if !built {
        let line = generate_error(&model, &["--device", "cuda", "--bind", "*=w8a16_static"]);
        assert!(
            line.starts_with("linear_proj/w8a16_static is linked but its kernels are not built: "),
            "{line}"
        );
    }
    // Where there is one, the same commands run.
    let model = tiny_dense();
    let generate = ["generate", "--model", &model, "--device", "cuda", "--max-new", "1", "x"];
    if !run(&generate).status.success() {
        let whole_step = "decode_loop/whole_step is linked but its kernels are not built: ";
        let expected = if built { "no CUDA device: " } else { whole_step };
        for args in [&generate[..], &["synth", "27b"]] {
            let line = error(args);
            assert!(line.starts_with(expected), "{line}");
        }
    }
}

#[test]
fn bad_prompts_are_refused() {
    let model = tiny_dense();
    let line = error(&["generate", "--model", &model, ""]);
    assert_eq!(line, "the prompt is empty; at least one token is needed");
    let line = error(&["generate", "--model", &model, "--prompt-tokens", "1,2048"]);
    assert_eq!(line, "token 2048 is outside the vocabulary of 2048");
    let long = vec!["7"; 5000].join(",");
    let line = error(&["generate", "--model", &model, "--prompt-tokens", &long]);
    assert!(line.contains("the window holds 4096"), "{line}");
}

#[test]
fn bad_token_files_are_refused() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("tokens.u16");
    let path = file.display().to_string();
    let model = tiny_dense();
    let eval = |extra: &[&str]| error(&[&["eval", "--model", &model, "--tokens", &path], extra].concat());
    assert!(eval(&[]).contains("No such file"));
    fs::write(&file, [0; 777]).unwrap();
    assert!(eval(&[]).contains("777 bytes is an odd length"));
    fs::write(&file, [0; 100]).unwrap();
    let line = eval(&[]);
    assert!(line.contains("50 tokens") && line.contains("less than one window of 256"), "{line}");
    assert!(eval(&["--window", "0"]).contains("--window is 0"));
    fs::write(&file, [0xff; 1000]).unwrap();
    assert_eq!(eval(&[]), "token 65535 is outside the vocabulary of 2048");
}
