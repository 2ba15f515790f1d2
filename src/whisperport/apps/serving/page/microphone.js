/** Runs beside the page: collects the microphone's samples as 16-bit integers, 100 ms at a time. */

const SAMPLES = 2400;  // at 24 kHz

class Microphone extends AudioWorkletProcessor {
  #piece = new Int16Array(SAMPLES);
  #length = 0;

  process([[samples]]) {
    for (const sample of samples ?? []) {
      this.#piece[this.#length] = Math.max(-1, Math.min(1, sample)) * 32767;
      this.#length += 1;
      if (this.#length === SAMPLES) this.#send();
    }
    return true;
  }

  #send() {
    this.port.postMessage(this.#piece.buffer, [this.#piece.buffer]);
    this.#piece = new Int16Array(SAMPLES);
    this.#length = 0;
  }
}

registerProcessor("microphone", Microphone);
