import { card } from "./base.js";

/** The page of a checkpoint. */
export function drawCheckpoint(found, live) {
  return card("Checkpoint");
}
